"""What the kernels over KV pages have in common: template arguments from a PageFormat, and the check of a PageRun."""

from functools import cache
from typing import cast

from rollkv.backend import PageFormat, PageRun
from rollkv.config import KvType
from rollkv.cuda.device import DeviceArray
from rollkv.cuda.nvrtc import KernelError

PAGE_CELLS = (16, 32, 64, 128, 256)
MAX_HEAD_DIM = 256
_ELEMENTS: dict[str, str] = {"f32": "float", "f16": "Half", "bf16": "Bf16"}


@cache
def template_arguments(key_type: KvType, value_type: KvType, key_dim: int, value_dim: int) -> str:
    """ "Half, Half, 128, 128" for C++. Raises KernelError for types and head sizes that the kernels do not have."""
    if key_type not in _ELEMENTS or value_type not in _ELEMENTS:
        raise KernelError(f"KV pages of {key_type} keys and {value_type} values have no kernel; use f32, f16 or bf16")
    for dim in (key_dim, value_dim):
        if dim % 16 or not 16 <= dim <= MAX_HEAD_DIM:
            raise KernelError(f"a head of {dim} elements has no attention kernel; a multiple of 16 up to {MAX_HEAD_DIM} has one")
    return f"{_ELEMENTS[key_type]}, {_ELEMENTS[value_type]}, {key_dim}, {value_dim}"


def check_run(kernel: str, run: PageRun, page: PageFormat) -> DeviceArray:
    """The run's pool. Raises KernelError when pool, slots or page size do not fit together."""
    pool = cast(DeviceArray, run.pool)
    if pool.dtype != "u8" or len(pool.shape) != 2 or pool.shape[0] < run.num_slots or pool.shape[1] != page.page_bytes:
        wanted = f"u8 [{run.num_slots}, {page.page_bytes}]"
        raise KernelError(f"{kernel}: the pool must be {wanted}, not {pool.dtype} {list(pool.shape)}")
    if page.page_cells not in PAGE_CELLS:
        raise KernelError(f"{kernel}: pages of {page.page_cells} cells have no kernel; {', '.join(map(str, PAGE_CELLS))} have one")
    if not (0 <= run.first_slot < run.num_slots and 0 <= run.num_pages <= run.num_slots and run.first_page >= 0):
        raise KernelError(f"{kernel}: a run of {run.num_pages} pages from slot {run.first_slot} on does not fit {run.num_slots} slots")
    return pool
