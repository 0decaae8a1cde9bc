"""Every kernel instance compiles for every architecture, without a GPU, and spills nothing.

Six minutes of one core, two of CI's six: when instances took turns, one architecture each, spills on the others went unseen.
Cubins are kept in pytest's cache directory with the compiler's log: what did not change since the last run is not compiled again.
"""

import re
from dataclasses import replace
from types import ModuleType

import pytest

from rollkv.cuda.kernels import linear_rows
from rollkv.cuda.nvrtc import ARCHS, CubinCache, compile_cubin, find_csrc
from rollkv.cuda.report_kernels import Resources, by_source, kernel_modules, resources

MODULES = kernel_modules()


def _kernel_body(text: str, name: str) -> str:
    """From the kernel's name to the next one's, or the end."""
    begin = re.search(rf"__launch_bounds__\(.*\) {name}\(", text)
    assert begin, name
    following = text.find("__global__", begin.end())
    return text[begin.start() : following if following >= 0 else len(text)]


def test_early_kernels_wait_for_those_before_them() -> None:
    """And read nothing that these write by the path of constant data: only weights may be `const __restrict__`."""
    early = {(spec.source, spec.expression.partition("<")[0]) for module in MODULES for spec in module.instances() if spec.early}
    assert {name for _, name in early} >= {
        "linear_row",
        "linear_rows",
        "qkv_append",
        "queries",
        "attn_decode",
        "attn_decode_mma",
        "attn_merge",
        "embed",
        "add",
    }
    constant = re.compile(r"const \w+\* __restrict__ (\w+)")
    for source, name in early:
        body = _kernel_body((find_csrc() / source).read_text(), name)
        assert body.count("wait_for_previous();") == 1 and body.count("let_next_begin();") == 1, f"{name} in {source}"
        known = {"p0", "p1", "p2", "p3", "bias", "weight", "q_norm", "k_norm"}
        assert set(constant.findall(body)) <= known, f"{name} in {source}"


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> CubinCache:
    kept = getattr(pytestconfig, "cache", None)  # absent with -p no:cacheprovider
    return CubinCache(kept.mkdir("cubins") if kept else tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_compiles_without_spills(module: ModuleType, arch: str, cache: CubinCache) -> None:
    instances = module.instances()
    assert len(set(instances)) == len(instances)
    for source, expressions in by_source(instances, arch).items():
        used = resources(cache.get(source, expressions, arch))
        assert set(used) == set(expressions)
        assert {name: r.spill_bytes for name, r in used.items() if r.spill_bytes} == {}
        assert all(r.registers > 0 for r in used.values())
        if module is linear_rows:  # what a launch adds must fit beside it: one row with 12,288 columns and norm leaves no byte of 99 KiB
            assert {name: r.shared_bytes for name, r in used.items()} == {name: _declared_by_product(name) for name in expressions}


def _declared_by_product(expression: str) -> int:
    """Shared memory, as the module reckons with it."""
    qtype, number = expression.partition("<")[2].rstrip(">").split(", ")[:2]
    one = expression.startswith("linear_row<")
    return linear_rows.row_static_shared_bytes() if one else linear_rows.static_shared_bytes(qtype, int(number))


def test_every_source_has_a_module() -> None:
    named = {spec.source for module in MODULES for spec in module.instances()}
    assert named == {path.name for path in find_csrc().glob("*.cu")}


def test_expressions_name_one_kernel_each() -> None:
    """On any one architecture: the launcher looks kernels up by expression."""
    specs = {spec for module in MODULES for spec in module.instances()}
    for arch in ARCHS:
        here = [spec.expression for spec in specs if spec.compiles_for(arch)]
        assert len(set(here)) == len(here)


def test_a_spill_is_seen(tmp_path) -> None:
    """A kernel that keeps 96 values in 32 registers must be reported, or the test above proves nothing."""
    (tmp_path / "spill.cu").write_text(
        "template <int N> __global__ void __launch_bounds__(1024, 2) spill(float* x) {\n"
        "  float v[N];\n#pragma unroll\n  for (int i = 0; i < N; i++) v[i] = x[i * 1024 + threadIdx.x];\n  __syncthreads();\n"
        "#pragma unroll\n  for (int i = 0; i < N; i++) x[(N - 1 - i) * 1024 + threadIdx.x] = v[i] * v[(i * 7 + 3) % N];\n}\n"
    )
    used = resources(compile_cubin("spill.cu", ("spill<96>",), "sm_90a", tmp_path))["spill<96>"]
    assert used.spill_bytes > 0 and used.registers == 32


def test_an_unreadable_log_is_no_pass() -> None:
    cubin = compile_cubin("add.cu", ("add<4, 256>",), "sm_80")
    assert resources(cubin) == {"add<4, 256>": Resources(registers=14, shared_bytes=0, stack_bytes=0, spill_bytes=0)}
    with pytest.raises(ValueError, match="add<4, 256>"):
        resources(replace(cubin, log="ptxas changed its mind"))
