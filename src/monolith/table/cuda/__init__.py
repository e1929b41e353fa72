"""Tables in the memory of a CUDA device."""

from monolith.table.cuda.cuda_table import CudaTable
from monolith.table.cuda.device_shares import device_shares
from monolith.table.cuda.spilling_table import SpillingTable

__all__ = ["CudaTable", "SpillingTable", "device_shares"]
