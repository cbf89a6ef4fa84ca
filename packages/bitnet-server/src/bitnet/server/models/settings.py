"""The server's settings."""

from __future__ import annotations

from dataclasses import dataclass

from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.support.units import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the server.

    Attributes:
        names: Names of the model passed to ``create_app``; answers carry the first. Empty: the file's name.
        api_keys: API keys, one of which a request must have; empty: no key is required.
        max_queue: Maximum number of waiting requests.
        max_seqs: Maximum number of requests that run at the same time on a device.
        max_body: Maximum bytes of a body.
        timeout: Maximum seconds for a request; None: no limit.
        cors: Origins whose pages may call the server; ``localhost``: those of this machine at any port; ``*``: all.
        page: Whether the page is served at ``/``.
        mcp: Addresses of MCP servers that the page may call, from the browser.
        max_stored: Maximum number of responses kept for ``previous_response_id``.
        file_storage: Folder for clients' files and the answers to their batches; None: there are neither.
        max_file_storage: Maximum bytes of these files.
        slot_save_path: Folder to which the tokens of slots are saved; None: slots keep none.
        max_memory: Maximum bytes of model files and KV caches loaded at the same time; None: no limit.
        reasoning_budget: Maximum tokens of a thought, for requests that say nothing about thinking; 0: no thought;
            None: no limit.
        model_aliases: Patterns of names that clients may use besides, such as ``claude-*``, each with the name of the
            model that answers; the first that matches counts.
        any_model: Whether the first model answers requests for models that are not here.

    Raises:
        InvalidInputError: A key is empty, which would admit requests without a key.
    """

    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    max_queue: int = 64
    max_seqs: int = 8
    max_body: int = 16 << 20
    timeout: float | None = None
    cors: tuple[str, ...] = ()
    page: bool = True
    mcp: tuple[str, ...] = ()
    max_stored: int = 256
    file_storage: str | None = None
    max_file_storage: int = 1_000_000_000
    slot_save_path: str | None = None
    max_memory: int | None = None
    reasoning_budget: int | None = None
    model_aliases: tuple[tuple[str, str], ...] = ()
    any_model: bool = False

    def __post_init__(self) -> None:
        if not all(key.strip() for key in self.api_keys):
            raise InvalidInputError("an API key is empty.", hint="Leave it out to require none.")

    def check_memory(self, name: str, needed: int) -> None:
        """Check that a model does not take more memory alone than all may together.

        Args:
            needed: Bytes of its file and KV cache.

        Raises:
            BitNetError: It does.
        """
        if self.max_memory is not None and needed > self.max_memory:
            most = size(self.max_memory)
            raise BitNetError(
                f"{name} takes {size(needed)} with its KV cache, more than --max-memory allows: {most}.",
                hint="Raise that, or lower --context or --parallel.",
            )
