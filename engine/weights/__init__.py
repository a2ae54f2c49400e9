"""Where do the weights come from? Finds, fetches, converts and checks models, without torch.

Everything here runs before the first tensor exists: a model becomes `ModelFiles`, its safetensors a
`WeightIndex`, and whoever loads them maps the files that the index names.
"""

from engine.weights.builtin import BUILTIN_MODELS, BuiltinModel
from engine.weights.config import KNOWN_ARCHITECTURES, ModelConfig
from engine.weights.model_files import ModelFiles
from engine.weights.model_tensors import tensor_shapes
from engine.weights.progress import NoProgress, ProgressSink, Stage
from engine.weights.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from engine.weights.safetensors_dir import (
    TensorLocation,
    WeightIndex,
    open_packed,
    open_weights,
    scales_of,
)
from engine.weights.staging import build_once
from engine.weights.store import ModelStore

__all__ = [
    "BUILTIN_MODELS",
    "KNOWN_ARCHITECTURES",
    "BuiltinModel",
    "FrequencyDivisors",
    "LinearScaling",
    "Llama3Scaling",
    "ModelConfig",
    "ModelFiles",
    "ModelStore",
    "NoProgress",
    "ProgressSink",
    "RopeScaling",
    "Stage",
    "TensorLocation",
    "WeightIndex",
    "YarnScaling",
    "build_once",
    "open_packed",
    "open_weights",
    "scales_of",
    "tensor_shapes",
]
