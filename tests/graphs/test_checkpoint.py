"""Checkpoint folders: what a plan reads is found, every kind of damage gets its own words."""
from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from k3plan.compiler.errors import CheckpointError
from k3plan.compiler.recipe import Cat, Leaf, Mul, Recipe, Reshape, Shard, StackLeaf
from k3plan.graphs.checkpoint import INDEX, SINGLE, Checkpoint
from k3plan.graphs.load import StateDictSource, Weight, load_weights
from k3plan.graphs.make_checkpoint import make_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EXPERTS = 3
RECIPES: dict[str, Recipe] = {
    "embed": Shard(0, 2, Leaf(("embed.weight",), (8, 4), "bf16")),
    "score": Mul(Leaf(("norm.weight",), (4,), "bf16"), Reshape((4,), Leaf(("proj.weight",), (1, 4), "bf16"))),
    "bias": Leaf(("old.bias", "bias"), (6,), "fp32"),
    "w13": Shard(1, 2, Cat(1, tuple(
        StackLeaf((f"experts.{{e}}.{name}",), EXPERTS, (4, 2), "u8") for name in ("w1", "w3")))),
}  # fmt: skip
WEIGHTS = {name: Weight(r, {"embed": "bf16", "w13": "u8"}.get(name, "fp32")) for name, r in RECIPES.items()}


def tensors() -> dict[str, torch.Tensor]:
    """All that ``RECIPES`` read, and two tensors of a vision tower."""
    torch.manual_seed(0)
    shapes = {"embed.weight": (8, 4), "norm.weight": (4,), "proj.weight": (1, 4), "vision_tower.a": (2,)}
    found = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    found |= {"bias": torch.randn(6), "mm_projector.b": torch.randn(2)}
    for e in range(EXPERTS):
        found |= {f"experts.{e}.{n}": torch.randint(0, 256, (4, 2)).to(torch.uint8) for n in ("w1", "w3")}
    return found


def write(folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> Path:
    save_file(first, folder / FIRST)
    save_file(second, folder / SECOND)
    weight_map = dict.fromkeys(first, FIRST) | dict.fromkeys(second, SECOND)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint of two files; ``score`` and ``w13`` read from both."""
    split = list(tensors().items())
    return write(tmp_path, dict(split[0::2]), dict(split[1::2]))


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def replace_tensor(folder: Path, name: str, *news: tuple[str, torch.Tensor]) -> None:
    """Rewrite the file of tensor ``name`` with others in its place, and the index."""
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    held = load_file(folder / file)
    del held[name]
    save_file(held | dict(news), folder / file)
    edit_index(folder, lambda m: (m.pop(name), m.update(dict.fromkeys(dict(news), file))))


def complaint(folder: Path, ignore: tuple[str, ...] | None = None) -> str:
    """The text of the error of ``check``, without its first line."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).check(WEIGHTS, *([ignore] if ignore is not None else []))
    first, _, rest = str(caught.value).partition("\n")
    assert first == f"checkpoint {folder} does not fit the plan"
    return rest


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sound_checkpoint_loads_as_from_memory(folder: Path, rank: int) -> None:
    checkpoint = Checkpoint(folder)
    checkpoint.check(WEIGHTS)
    got = checkpoint.load(WEIGHTS, rank)
    want = load_weights(StateDictSource(tensors()), WEIGHTS, rank)
    assert list(got) == list(WEIGHTS)
    for name in WEIGHTS:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name], want[name]), name


def test_loaded_weights_do_not_need_the_files(folder: Path) -> None:
    got = Checkpoint(folder).load(WEIGHTS)
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    assert torch.equal(got["bias"], tensors()["bias"])


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.check(WEIGHTS)
    assert torch.equal(checkpoint.load(WEIGHTS)["bias"], tensors()["bias"])


def test_each_file_is_opened_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3plan.graphs import checkpoint as module

    opened: list[str] = []
    real = module.safe_open

    def opening(path: Path, **options: str) -> object:
        opened.append(path.name)
        return real(path, **options)

    monkeypatch.setattr(module, "safe_open", opening)
    Checkpoint(folder).load(WEIGHTS)
    assert sorted(opened) == [FIRST, SECOND]


def test_progress_is_for_terminals(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpoint(folder).load(WEIGHTS)
    assert capsys.readouterr().err == "", "a log file is no terminal"
    monkeypatch.setenv("FORCE_COLOR", "1")
    Checkpoint(folder).load(WEIGHTS, progress=False)
    assert capsys.readouterr().err == ""
    Checkpoint(folder).load(WEIGHTS)
    assert "loading weights" in capsys.readouterr().err


def test_missing_and_extra_with_a_suggestion(folder: Path) -> None:
    replace_tensor(folder, "norm.weight", ("norms.weight", torch.ones(4).bfloat16()))
    replace_tensor(folder, "bias")
    where = json.loads((folder / INDEX).read_text())["weight_map"]["norms.weight"]
    assert complaint(folder) == (
        "  tensors that the plan reads are missing (2):\n"
        "    norm.weight, bf16 [4]; did you mean norms.weight?\n"
        "    old.bias or bias, fp32 [6]\n"
        "    fix: check that the config is this checkpoint's\n"
        "  tensors are read by nothing (1):\n"
        f"    norms.weight in {where}\n"
        "    fix: check the config, or name their prefix in `ignore`"
    )


def test_long_lists_are_cut(folder: Path) -> None:
    replace_tensor(folder, "vision_tower.a", *((f"spare.{i:03d}", torch.zeros(1)) for i in range(322)))
    text = complaint(folder)
    assert "tensors are read by nothing (322):" in text
    assert "spare.009" in text
    assert "spare.010" not in text
    assert "    ... and 312 more\n" in text
    Checkpoint(folder).check(WEIGHTS, ("spare.", "mm_projector."))


def test_ignored_prefixes_are_the_callers(folder: Path) -> None:
    assert complaint(folder, ()).startswith("  tensors are read by nothing (2):\n    mm_projector.b in model-0000")


def test_wrong_shape_and_dtype(folder: Path) -> None:
    replace_tensor(folder, "embed.weight", ("embed.weight", torch.zeros(8, 5)))
    replace_tensor(folder, "experts.1.w3", ("experts.1.w3", torch.zeros(4, 2, dtype=torch.int8)))
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    assert complaint(folder) == (
        "  tensors have another shape (1):\n"
        f"    embed.weight in {files['embed.weight']}: expected [8, 4], found [8, 5]\n"
        "    fix: check that the config is this checkpoint's\n"
        "  tensors have another dtype (1):\n"
        f"    experts.1.w3 in {files['experts.1.w3']}: expected u8, found i8\n"
        "    fix: use a checkpoint that was not converted (plain floats may differ)"
    )


def test_a_stored_float_may_be_another_and_rounding_is_announced(folder: Path) -> None:
    assert Checkpoint(folder).check(WEIGHTS) == ""
    replace_tensor(folder, "bias", ("bias", tensors()["bias"].bfloat16()))
    assert Checkpoint(folder).check(WEIGHTS) == "", "widening loses nothing"
    replace_tensor(folder, "embed.weight", ("embed.weight", tensors()["embed.weight"].float()))
    replace_tensor(folder, "norm.weight", ("norm.weight", tensors()["norm.weight"].float()))
    said = "1 tensor stored as fp32 will be read as bf16: embed.weight"
    assert Checkpoint(folder).check(WEIGHTS) == said, "the norm becomes fp32 anyway"
    got = Checkpoint(folder).load(WEIGHTS)
    assert torch.equal(got["embed"], tensors()["embed.weight"][:4])
    assert torch.equal(got["bias"], tensors()["bias"].bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_packed_bytes_are_never_converted(folder: Path, dtype: torch.dtype) -> None:
    replace_tensor(folder, "experts.0.w1", ("experts.0.w1", torch.zeros(4, 2, dtype=dtype)))
    assert "experts.0.w1" in complaint(folder)
    with pytest.raises(CheckpointError, match="the plan reads u8"):
        Checkpoint(folder).load(WEIGHTS)


def test_an_absent_file_is_one_finding_not_many(folder: Path) -> None:
    count = len(load_file(folder / SECOND))
    (folder / SECOND).unlink()
    assert complaint(folder) == (
        "  files that the index names are absent (1):\n"
        f"    {SECOND}, with {count} tensors\n"
        "    fix: finish the download"
    )


def test_index_and_files_disagree(folder: Path) -> None:
    edit_index(folder, lambda m: (m.pop("bias"), m.update({"ghost": FIRST})))
    file = FIRST if "bias" in load_file(folder / FIRST) else SECOND
    assert complaint(folder) == (
        "  tensors are in the index but not in the file that it names (1):\n"
        f"    ghost in {FIRST}\n"
        "    fix: the index is of other files\n"
        "  tensors that the plan reads are missing (1):\n"
        f"    old.bias or bias, fp32 [6]; bias is in {file} but not in the index\n"
        "    fix: check that the config is this checkpoint's"
    )


def test_a_truncated_file_names_the_tensors_behind_its_end(folder: Path) -> None:
    path = folder / FIRST
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    text = complaint(folder)
    assert text.startswith("  parts of files are damaged (1):\n")
    assert f"ends at byte {len(data)}, the file has {len(data) - 3}: truncated" in text
    assert "missing" not in text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x10\0\0", "the header should have 16 bytes, the file has 3: truncated, or not safetensors"),
        (b"<!DOCTYPE html>", "the header should have 5789751444030890300 bytes, the file has 15: truncated"),
        (b"\x05\0\0\0\0\0\0\0{nope", "the header is not JSON (Expecting property name"),
        (b"\x02\0\0\0\0\0\0\0[]", "the header is not a JSON object: corrupt"),
    ],
)
@pytest.mark.parametrize("file", [FIRST, SINGLE])
def test_corrupt_headers(folder: Path, data: bytes, said: str, file: str) -> None:
    if file == SINGLE:
        (folder / INDEX).unlink()
    (folder / file).write_bytes(data)
    text = complaint(folder)
    assert text.startswith(f"  parts of files are damaged (1):\n    {file}: {said}")
    assert "missing" not in text


def bf16(*offsets: int) -> dict[str, object]:
    """A header entry of 64 bytes with these offsets."""
    return {"dtype": "BF16", "shape": [8, 4], "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (7, "malformed header entry 7"),
        ({"dtype": "BF16", "shape": [8]}, "malformed header entry {'dtype': 'BF16', 'shape': [8]}"),
        (bf16(0, 60), "bf16 [8, 4] needs 64 bytes, the header gives 60"),
        (bf16(64, 0), "bf16 [8, 4] needs 64 bytes, the header gives -64"),
        (bf16(-64, 0), "it begins at byte -64 of the data"),
    ],
)
def test_bad_header_entries(folder: Path, entry: object, said: str) -> None:
    file = json.loads((folder / INDEX).read_text())["weight_map"]["embed.weight"]
    path = folder / file
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]) | {"embed.weight": entry}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert f"    {file}: tensor embed.weight: {said}\n" in complaint(folder)


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"has neither {INDEX} nor {SINGLE}: name the folder"):
        Checkpoint(tmp_path)
    for text in ("{", "[]", '{"weight_map": 3}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(CheckpointError, match=r"index.json is not a safetensors index \(.*download it again"):
            Checkpoint(tmp_path)


def test_read_errors_name_file_and_tensor(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    file = checkpoint.tensors["embed.weight"].file
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=rf"{file}: tensor \S+ cannot be read: "):
        checkpoint.load(WEIGHTS)
    save_file({name: torch.zeros(1, 1) for name in names_in_header(data)}, folder / file)
    with pytest.raises(CheckpointError, match=rf"{file}: tensor \S+ (cannot be read|changed since)"):
        checkpoint.load(WEIGHTS)


def names_in_header(data: bytes) -> list[str]:
    length = int.from_bytes(data[:8], "little")
    return [name for name in json.loads(data[8 : 8 + length]) if name != "__metadata__"]


def test_a_tiny_checkpoint_loads_quickly(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, attention=("kda", "mla"), mlp=("dense", "moe"))
    stem = "language_model.model.layers.1.block_sparse_moe.experts.{e}.w1.weight_packed"
    shape = (model.moe_intermediate, model.expert_width // 2)
    recipe = Shard(1, 4, StackLeaf((stem,), model.experts, shape, "u8"))
    start = time.perf_counter()
    got = Checkpoint(tmp_path).load({"w1": Weight(recipe, "u8")}, 2)["w1"]
    assert time.perf_counter() - start < 2, "takes some milliseconds"
    file = load_file(tmp_path / "model-00002-of-00003.safetensors")
    assert torch.equal(got[5], file[stem.replace("{e}", "5")][256:384])
