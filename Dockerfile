# `bitnet serve` in a container; docs/serve-deploy.md says how to run it.
#   docker build -t bitnet .
#   docker build -t bitnet:cuda --build-arg BACKENDS=cuda .
# NVIDIA's driver comes from the host (NVIDIA Container Toolkit), and bitnet-cuda brings its compiler as a wheel.
FROM python:3.13-slim AS build
ARG BACKENDS=""
COPY . /src
WORKDIR /src
RUN python -m venv /opt/bitnet
RUN /opt/bitnet/bin/pip install --no-cache-dir --target .uv uv
RUN .uv/bin/uv run --frozen --only-group clients tools/vendor_page.py
RUN for name in core server ${BACKENDS}; do .uv/bin/uv build --wheel --package "bitnet-$name" --out-dir /dist; done
RUN /opt/bitnet/bin/pip install --no-cache-dir /dist/*.whl "$(echo /dist/bitnet_server-*.whl)[structured]"

FROM python:3.13-slim
COPY --from=build /opt/bitnet /opt/bitnet
ENV BITNET_CACHE_DIR=/tmp/bitnet NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
EXPOSE 8080
HEALTHCHECK --start-period=60s CMD ["/opt/bitnet/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["/opt/bitnet/bin/bitnet", "serve", "--host", "0.0.0.0"]
CMD ["-m", "/models/model.gguf"]
