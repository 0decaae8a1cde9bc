"""The GGUF reader against package gguf, against files written byte by byte, and against damage of every kind."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import damaged_gguf as make
from rollkv.errors import ModelFileError, RollkvError, UnsupportedModelError
from rollkv.gguf_file import open_gguf
from rollkv.gguf_header import FILE_TYPES, SUPPORTED_TYPES, TENSOR_TYPES
from rollkv.model_config import model_config

TESTS = Path(__file__).parent
FIXTURES = TESTS / "fixtures"
REAL_MODELS = Path(os.environ.get("ROLLKV_MODELS", Path.home() / ".cache/rollkv/models"))


def write(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def assert_same_as_package_gguf(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert list(ours.metadata) == list(fields)
        for name, field in fields.items():
            value = ours.metadata[name]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == field.contents(), name
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            mine = ours.tensors[tensor.name]
            assert mine.qtype == tensor.tensor_type.name
            assert mine.shape == tuple(int(dim) for dim in tensor.shape[::-1])
            assert np.array_equal(mine.raw, tensor.data.reshape(-1).view(np.uint8))
            assert mine.file == str(path)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_fixtures_read_as_package_gguf_reads_them(name: str) -> None:
    assert_same_as_package_gguf(FIXTURES / f"{name}.gguf")


def test_real_model_reads_as_package_gguf_reads_it() -> None:
    path = REAL_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not there; `make demo` brings it")
    assert_same_as_package_gguf(path)
    with open_gguf(path) as file:
        assert file.file_type == "Q4_1"
        assert file.size_bytes == path.stat().st_size


def test_type_tables_equal_those_of_package_gguf() -> None:
    constants = pytest.importorskip("gguf.constants")
    known = {int(kind): (kind.name, *constants.GGML_QUANT_SIZES[kind]) for kind in constants.GGMLQuantizationType}
    assert {name for name, *_ in known.values()} >= set(SUPPORTED_TYPES)
    for number in known.keys() & TENSOR_TYPES.keys():  # either may know newer types than the other
        assert known[number] == tuple(TENSOR_TYPES[number])
    for kind in constants.LlamaFileType:
        if int(kind) in FILE_TYPES:
            assert kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") == FILE_TYPES[int(kind)]


def test_every_value_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    keys: dict[str, bytes] = {}
    wanted: dict[str, object] = {}
    for kind, letter in make.FORMATS.items():
        dtype = np.dtype(letter if letter != "?" else bool).newbyteorder("<")
        values = np.frombuffer(rng.bytes(5 * dtype.itemsize), dtype) if kind != make.BOOL else np.array([0, 1, 1, 0, 1], bool)
        keys |= {f"one.{kind}": make.scalar(kind, values[1].item()), f"many.{kind}": make.array(kind, values.tolist())}
        wanted |= {f"one.{kind}": values[1].item(), f"many.{kind}": values}
    words = ["", "a", "\N{SNOWMAN}\0", "é" * 300]
    keys |= {
        "one.text": make.scalar(make.STRING, words[3]),
        "many.text": make.array(make.STRING, words),
        "none": make.array(make.STRING, []),
    }
    with open_gguf(write(tmp_path, make.model(keys))) as file:
        for name, value in wanted.items():
            got = file.metadata[name]
            assert np.array_equal(np.asarray(got), np.asarray(value), equal_nan=np.asarray(value).dtype.kind == "f"), name
            assert type(got) is type(value), name
        assert file.metadata["one.text"] == words[3]
        assert file.metadata["many.text"] == words
        assert file.metadata["none"] == []
        assert file.metadata.get("absent") is None and "absent" not in file.metadata


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096, 65536])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    key = {"general.alignment": make.scalar(make.U32, alignment)}
    with open_gguf(write(tmp_path, make.model(key, version=version, alignment=alignment))) as file:
        for name, values in make.tiny_tensors().items():
            tensor = file.tensor(name)
            assert tensor.shape == values.shape
            assert np.array_equal(tensor.raw.view("<f4").reshape(values.shape), values)
            assert not tensor.raw.flags.writeable


def test_last_tensor_needs_no_padding(tmp_path: Path) -> None:
    odd = {"zz.weight": np.arange(3, dtype=np.float32)}
    padded = make.model(tensors=odd)
    with open_gguf(write(tmp_path, padded[:-20])) as file:
        assert file.tensors["zz.weight"].raw.nbytes == 12


def load(path: Path) -> None:
    """What every command does first; the name is read as `info` reads it."""
    with open_gguf(path) as file:
        for key in file.metadata:
            file.metadata[key]
        model_config(file)


def test_undamaged_tiny_model_loads(tmp_path: Path) -> None:
    load(write(tmp_path, make.SOUND))


@pytest.mark.parametrize("damage", make.DAMAGED, ids=lambda damage: damage.name)
def test_damaged_file_gives_its_one_line(tmp_path: Path, damage: make.Damage) -> None:
    path = damage.make(tmp_path)
    with pytest.raises(ModelFileError, match=damage.message) as caught:
        load(path)
    message = str(caught.value)
    assert type(caught.value) is damage.error
    assert caught.value.exit_code == 4
    assert "\n" not in message and message.isprintable()
    assert len(message) < 500
    assert str(tmp_path)[:40] in message


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_damaged_files_stay_small_in_memory(tmp_path: Path) -> None:
    """All of them, one after the other, in one process of their own."""
    program = (
        "import sys, pathlib\n"
        "import damaged_gguf as make\n"
        "from rollkv.errors import RollkvError\n"
        "from rollkv.gguf_file import open_gguf\n"
        "from rollkv.model_config import model_config\n"
        "for index, damage in enumerate(make.DAMAGED):\n"
        "    folder = pathlib.Path(sys.argv[1]) / str(index)\n"
        "    folder.mkdir()\n"
        "    try:\n"
        "        with open_gguf(damage.make(folder)) as file:\n"
        "            model_config(file)\n"
        "    except RollkvError:\n"
        "        pass\n"
        "print(pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
    )
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    peak_bytes = int(done.stdout) * 1024
    assert peak_bytes < 300e6


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path, make.SOUND)
    path.chmod(0)
    with pytest.raises(ModelFileError, match="cannot be read: Permission denied"):
        open_gguf(path)


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_gguf(path)


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    names = {"evil\x1b[2J\n.weight": np.zeros((2, 33), np.float32)}
    bend = {"evil\x1b[2J\n.weight": lambda info: (*info[:2], make.Q8_0, info[3])}
    with pytest.raises(ModelFileError, match="33 columns") as caught:
        open_gguf(write(tmp_path, make.model(tensors=names, infos=bend)))
    assert str(caught.value).isprintable()


def survives(path: Path, content: bytes) -> bool:
    """Whether the file still loads; anything but a RollkvError fails the test."""
    path.write_bytes(content)
    try:
        load(path)
    except RollkvError as error:
        assert str(error).isprintable()
        return False
    return True


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in [*range(make.DATA_START + 1), *range(make.DATA_START, len(make.SOUND), 997)]:
        assert not survives(path, make.SOUND[:length]), length


def test_flipped_header_bytes_never_escape(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    path, refused = tmp_path / "model.gguf", 0
    for place in range(make.DATA_START):
        for flip in (0xFF, 0x80, int(rng.integers(1, 256))):
            content = bytearray(make.SOUND)
            content[place] ^= flip
            refused += not survives(path, bytes(content))
    assert refused > make.DATA_START  # most flips hit something that matters


def test_huge_numbers_in_the_header_never_escape(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for place in range(4, make.DATA_START - 8):
        for number in (0, 1 << 31, (1 << 62) + 1, (1 << 64) - 1)[place % 2 :: 2]:
            survives(path, make.SOUND[:place] + struct.pack("<Q", number) + make.SOUND[place + 8 :])


def test_random_headers_never_escape(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    path = tmp_path / "model.gguf"
    for _ in range(300):
        small = struct.pack("<QQ", *rng.integers(0, 4, 2).tolist())
        assert not survives(path, b"GGUF\x03\0\0\0" + small + rng.integers(0, 9, 400).astype(np.uint8).tobytes())


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_opens_the_whole_set(tmp_path: Path, given: int) -> None:
    paths = make.shard_set(tmp_path)
    with open_gguf(paths[given]) as file:
        assert file.path == paths[given]
        assert file.shards == tuple(paths)
        assert file.size_bytes == sum(path.stat().st_size for path in paths)
        assert file.architecture == "llama"
        for name, values in make.tiny_tensors().items():
            assert np.array_equal(file.tensors[name].raw, values.reshape(-1).view(np.uint8))
        assert {tensor.file for tensor in file.tensors.values()} == {str(path) for path in paths}
        model_config(file)


def test_set_of_one_and_name_without_a_set(tmp_path: Path) -> None:
    for path in (*make.shard_set(tmp_path, count=1), write(tmp_path, make.SOUND, "b-00001-of-00001.gguf")):
        with open_gguf(path) as file:
            model_config(file)


def test_missing_parts_are_counted(tmp_path: Path) -> None:
    make.shard_set(tmp_path, count=11)
    for path in list(tmp_path.iterdir())[:7]:
        path.unlink()
    left = next(tmp_path.iterdir())
    with pytest.raises(ModelFileError, match="of the 11 files of the set, missing: .* and 4 more"):
        open_gguf(left)


def test_unknown_type_on_an_unused_tensor_does_not_matter(tmp_path: Path) -> None:
    extra = {"extra.weight": np.ones((2, 32), np.float32)}
    content = make.model(tensors=extra, infos={"extra.weight": lambda info: (*info[:2], 250, info[3])})
    with open_gguf(write(tmp_path, content)) as file:
        model_config(file)
        assert file.tensors["extra.weight"].qtype == "type 250"
        assert file.tensors["extra.weight"].raw.nbytes == 0
        with pytest.raises(UnsupportedModelError, match="extra.weight has type 250, supported are F32"):
            file.tensor("extra.weight")


def test_unknown_type_on_a_needed_tensor_leaves_the_metadata_readable(tmp_path: Path) -> None:
    content = make.model(infos={"token_embd.weight": lambda info: (*info[:2], 42, info[3])})
    with open_gguf(write(tmp_path, content)) as file:
        assert file.metadata["general.name"] == "tiny"
        assert file.architecture == "llama"
        with pytest.raises(UnsupportedModelError, match=f"token_embd.weight has type 42, supported are {', '.join(SUPPORTED_TYPES)}"):
            model_config(file)


def test_file_type_label(tmp_path: Path) -> None:
    for number, label in [(15, "Q4_K_M"), (7, "Q8_0"), (999, "F32"), (None, "F32")]:
        key = {"general.file_type": None if number is None else make.scalar(make.U32, number)}
        with open_gguf(write(tmp_path, make.model(key))) as file:
            assert file.file_type == label
    with open_gguf(write(tmp_path, make.header([], []))) as file:
        assert file.file_type == "none"
        assert file.architecture == ""


def test_large_vocabulary(tmp_path: Path) -> None:
    """262,144 tokens and 515,000 merges: read whole, and the tokens without touching the merges."""
    tokens = [f"tok{i}" if i % 5 else f"\N{GREEK SMALL LETTER ALPHA}{i}" for i in range(1 << 18)]
    merges = [f"a{i} b{i}" for i in range(515_000)]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    packed = {}
    for key, words in keys.items():
        body = b"".join(struct.pack("<Q", len(raw)) + raw for raw in map(str.encode, words))
        packed[key] = struct.pack("<IIQ", make.ARRAY, make.STRING, len(words)) + body
    with open_gguf(write(tmp_path, make.model(packed))) as file:
        assert file.metadata["tokenizer.ggml.tokens"] == tokens
        assert file.metadata["tokenizer.ggml.merges"] == merges
        assert file.metadata["tokenizer.ggml.tokens"] is file.metadata["tokenizer.ggml.tokens"]  # decoded once


def test_views_outlive_close(tmp_path: Path) -> None:
    path = write(tmp_path, make.SOUND)
    file = open_gguf(path)
    raw, name = file.tensors["token_embd.weight"].raw, file.metadata["general.name"]
    file.close()
    file.close()
    assert file.tensors == {}
    assert name == "tiny"
    assert np.array_equal(raw, make.tiny_tensors()["token_embd.weight"].reshape(-1).view(np.uint8))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_closing_releases_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, make.SOUND)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with open_gguf(path) as file:
            model_config(file)
        try:
            open_gguf(write(tmp_path, make.SOUND[:-1], "cut.gguf"))
        except ModelFileError:
            pass
    assert len(os.listdir("/proc/self/fd")) <= before + 3
