# /// script
# requires-python = ">=3.10"
# dependencies = ["openai==2.54.0", "sentence-transformers==6.2.0", "transformers>=5,<6"]
# [tool.uv]
# exclude-newer = "2026-11-27T00:00:00Z"
# ///
"""sentence-transformers over a server: vectors, similarities, search and an evaluator.

The library has no client for servers. Its first module may be anything that makes vectors of texts; here, that is the
openai client.
"""

import json
import sys
from typing import Any

import openai
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import InputModule
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.util import semantic_search

TEXTS = ["What is BitNet?", "Weather", "naïve 😀 text", "It rains. " * 30]


class Served(InputModule):  # type: ignore[misc]
    """Asks a server for the vectors of texts."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__()
        self.client, self.model = openai.OpenAI(base_url=url, api_key="none", max_retries=0), model

    def preprocess(self, inputs: Any, prompt: str | None = None, **_: Any) -> dict[str, Any]:
        return {"texts": [(prompt or "") + text for text in inputs]}

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        made = self.client.embeddings.create(model=self.model, input=features["texts"])
        return {**features, "sentence_embedding": torch.tensor([one.embedding for one in made.data])}

    def save(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError


model = SentenceTransformer(modules=[Served(sys.argv[1], "m")], device="cpu", prompts={"query": "query: "})
vectors = model.encode(TEXTS, batch_size=3)
numbered = {str(i): text for i, text in enumerate(TEXTS)}
evaluator = InformationRetrievalEvaluator(numbered, numbered, {i: {i} for i in numbered}, show_progress_bar=False)
out = {
    "texts": TEXTS,
    "vectors": vectors.tolist(),
    "query": model.encode(TEXTS[:1], prompt_name="query")[0].tolist(),
    "similarity": model.similarity(vectors, vectors).tolist(),
    "found": [[hit["corpus_id"] for hit in hits] for hits in semantic_search(vectors, vectors, top_k=len(TEXTS))],
    "accuracy": float(evaluator(model)["cosine_accuracy@1"]),
}
print(json.dumps(out))
