"""The floors: a module imports only from floors below its own. This list is the only place where the order is written.

Imports inside functions and under TYPE_CHECKING count. Modules of one row do not know each other; where a floor has several rows, a row
may use those above it. A module that is missing here, or is listed and does not exist, fails the test.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rollkv"

KERNELS = (
    "add", "attn_decode", "attn_decode_coded", "attn_merge", "attn_prefill", "choose", "dequantise", "embed", "linear_rows", "noise", "prepare_step", "qkv_append", "queries", "reencode_pages", "repack",
    "rope_table", "round_rows", "synth_noise", "turn_back", "unpack_pages",
)  # fmt: skip

# fmt: off
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("F0 errors", ("errors",)),
    ("F0 .. words", ("units", "phases", "cache_dir", "whole_file", "kv_types")),
    ("F1 facts", ("config",)),
    ("F2 .. random bits", ("split_mix",)),
    ("F2 files and pure functions",
     ("gguf_header", "quants", "pretokenizers", "vocabulary", "score_merge", "chat_sandbox", "sampling", "stop_strings", "pages", "rope", "host_memory", "numa", "models",
      "counts", "prose", "metrics", "kv_codes", "kv_formats", "logit_file", "plots", "ladder_fit", "synth_shapes")),
    ("F2 .. from those", ("gguf_file", "dual_chunk", "tokenizer", "chat", "ladder_plot", "page_maker", "stream_plan", "workspace", "roofline", "residency", "synth_blocks", "synth_circuit", "synth_words")),
    ("F2 .. the sum of it", ("model_config", "hf_config", "budget", "machine_rates", "synth_plan", "synth_noise")),
    ("F2 .. from those", ("synth", "ubatch")),
    ("F3 contract and oracle", ("backend", "reference")),
    ("F3 .. cells by their layout", ("kv_page",)),
    ("F4 the machine at hand", ("host_backend",)),
    ("F4 the GPU: libraries", ("cuda.driver", "cuda.nvrtc", "cuda.nvml")),
    ("F4 .. device and memory", ("cuda.context", "cuda.device", "cuda.graph", "cuda.memory", "cuda.pinned", "cuda.environment")),
    ("F4 .. built on those", ("cuda.copies", "cuda.weights_gpu", "cuda.kernels.kv_format")),
    ("F4 .. common to those", ("cuda.kernels.activation",)),
    ("F4 .. one operation each", tuple(f"cuda.kernels.{name}" for name in KERNELS)),
    ("F4 .. large products, weights", ("cuda.gemm", "cuda.loading")),
    ("F4 .. all operations", ("cuda.operations",)),
    ("F4 .. a run without a device", ("cuda.rehearsal",)),
    ("F4 .. all of it", ("cuda.backend", "cuda.report_kernels")),
    ("F5 state", ("weights", "staging_ring")),
    ("F5 .. the sum of it", ("kv_cache",)),
    ("F6 the forward pass", ("model.step",)),
    ("F6 .. shared blocks", ("model.blocks",)),
    ("F6 .. families", ("model.llama", "model.gemma3")),
    ("F6 .. all layers", ("model.forward",)),
    ("F6 .. one token at a time; a run gone through", ("model.decode", "model.fill", "model.rehearsal")),
    ("F7 what a run holds", ("run_plan",)),
    ("F7 .. the loop", ("engine",)),
    ("F7 .. from a file to it", ("startup",)),
    ("F8 tasks and printing", ("tasks.generate", "tasks.equiv_specs", "tasks.record", "tasks.ceilings", "tasks.ladder", "tasks.peers", "tasks.answers", "tasks.suggest", "report")),
    ("F8 .. what a file says of a run", ("tasks.stored_run",)),
    ("F8 .. from those", ("tasks.haystack", "tasks.logit_equiv", "tasks.climb", "tasks.ladder_rows")),
    ("F8 .. from those", ("tasks.needle", "tasks.ladder_prompts")),
    ("F9 the door for programs", ("",)),
    ("F9 options and results", ("cli.options", "cli.positions", "cli.results", "cli.markdown")),
    ("F9 .. from those", ("cli.equiv_options", "cli.equiv_text", "cli.ladder_compare", "cli.ladder_rungs", "cli.ladder_run")),
    ("F9 .. from those", ("cli.ladder_text",)),
    ("F9 .. from those", ("cli.ladder_results",)),
    ("F9 commands", ("cli.generate", "cli.info", "cli.ladder", "cli.logit_equiv", "cli.needle", "cli.plan", "cli.synth", "cli.tokenize")),
    ("F9 the door for people", ("cli.main",)),
    ("F9 .. python -m rollkv", ("__main__",)),
)
# fmt: on


def module_name(path: Path) -> str:
    """cuda.driver for rollkv/cuda/driver.py; nothing for the package itself."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_files() -> dict[str, Path]:
    """Every module; the sub-packages' own __init__.py are checked to be empty instead."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "__init__.py" and path.parent != PACKAGE:
            assert path.read_text().strip() == "", f"{path} must stay empty: a re-export is an edge for everyone"
        else:
            files[module_name(path)] = path
    return files


def imported(source: str, known: set[str]) -> set[str]:
    """Modules of this package that `source` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "rollkv":
                inner = name.partition(".")[2]
                if inner == "__version__":  # a word of the package itself, without an edge to what `rollkv.load` needs
                    continue
                while inner not in known and inner not in SUB_PACKAGES:  # a name inside a module
                    inner = inner.rpartition(".")[0]
                found.add(inner)
    return found - SUB_PACKAGES  # they are empty, so that importing one is no edge


SUB_PACKAGES = {module_name(path) for path in PACKAGE.rglob("*/__init__.py")} - {""}
FILES = package_files()


def test_every_module_has_a_floor():
    listed = [module for _, modules in FLOORS for module in modules]
    assert len(listed) == len(set(listed)), "a module is listed twice"
    assert set(listed) == set(FILES), "the list and the modules differ"


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module):
    rows = {name: index for index, (_, modules) in enumerate(FLOORS) for name in modules}
    for other in sorted(imported(FILES[module].read_text(), set(FILES)) - {module}):
        assert {module, other} <= set(rows), f"{module or 'rollkv'} imports {other}: a module without a floor"
        assert rows[other] < rows[module], f"{module or 'rollkv'} ({FLOORS[rows[module]][0]}) imports {other} ({FLOORS[rows[other]][0]})"


def test_hidden_imports_are_seen():
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from rollkv.engine import Engine
def late():
    import rollkv.units
    from rollkv import report, load, __version__
    from rollkv.cuda import driver
    from rollkv.cli.options import Model
    import numpy
"""
    known = {"", "engine", "units", "report", "cuda.driver", "cli.options"}
    assert imported(source, known) == known


def test_only_the_gpu_floor_and_its_user_know_the_gpu():
    """Everything below the engine runs without the vendor's libraries."""
    foreign = {"cuda", "nvmath", "pynvml", "cupy", "torch"}
    for module, path in FILES.items():
        roots = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add((node.module or "").split(".")[0])
        assert module.startswith("cuda.") or not roots & foreign, f"{module} imports {roots & foreign}"
