"""Models: their files, configuration, weights and programs."""

from bitnet.core.model.config import ModelConfig
from bitnet.core.model.default import default_model_path
from bitnet.core.model.file import ModelFile, open_model

__all__ = ["ModelConfig", "ModelFile", "default_model_path", "open_model"]
