"""The numbers of csrc/activation.cuh."""

from collections.abc import Mapping
from types import MappingProxyType

NO_ACTIVATION = 0
ACTIVATIONS: Mapping[str, int] = MappingProxyType({"silu": 1, "gelu_tanh": 2})
