"""Tables in the memory of a CUDA device."""

from monolith.table.cuda.cuda_table import CudaTable
from monolith.table.cuda.growth import device_budgets
from monolith.table.cuda.spilling_table import SpillingTable

__all__ = ["CudaTable", "SpillingTable", "device_budgets"]
