"""Tables in the memory of a CUDA device."""

from monolith.table.cuda.cuda_table import CudaTable

__all__ = ["CudaTable"]
