"""Plan files to Spec: every kind of error, precedence of files and flags, origins, the schema, the time it takes."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from k3plan.compiler.errors import SpecError
from k3plan.compiler.reading import planfile
from k3plan.compiler.reading.source import load_spec, show_resolved

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "spec"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
MINIMAL = "version: 1\nmodel: {preset: kimi-linear-48b}\n"
# bases that are not cases of their own
CASES = [path.stem for path in sorted(GOLDEN.glob("*.yaml")) if path.stem not in ("circle_base",)]


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def problems(path: str, *flags: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(path, flags)
    return [str(problem) for problem in caught.value.problems]


def flags_of(text: str) -> list[str]:
    """The ``# --set ...`` lines at the top of a golden case."""
    mark = "# --set "
    return [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]


@pytest.mark.parametrize("case", CASES)
def test_error_text(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """UPDATE_GOLDEN=1 writes the texts anew."""
    monkeypatch.chdir(GOLDEN)
    flags = flags_of(Path(f"{case}.yaml").read_text())
    with pytest.raises(SpecError) as caught:
        load_spec(f"{case}.yaml", flags)
    text = f"{caught.value}\n"
    if os.environ.get("UPDATE_GOLDEN"):
        Path(f"{case}.txt").write_text(text)
    assert text == Path(f"{case}.txt").read_text()


@pytest.mark.parametrize("case", CASES)
def test_carets_stand_under_the_token(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem with a line quotes that line of that file, and its carets start at its column."""
    monkeypatch.chdir(GOLDEN)
    with pytest.raises(SpecError) as caught:
        load_spec(f"{case}.yaml", flags_of(Path(f"{case}.yaml").read_text()))
    for problem in caught.value.problems:
        assert problem.hint, problem
        if problem.where.line:
            line = Path(problem.where.file).read_text().split("\n")[problem.where.line - 1]
            quoted, carets = problem.excerpt.split("\n")
            assert quoted == line.replace("\t", " ").rstrip()
            assert carets.index("^") == problem.where.column - 1
            assert len(carets) <= max(len(quoted), 1) + 1


ONE_WRONG_VALUE = {
    "parallel.tp": ("3", "allowed: 1, 2, 4, 8, 16, 32"),
    "parallel.experts": ("tpp", "did you mean tp?"),
    "step.sequences": ("0", "1 or more"),
    "step.query": ("9", "8 or less"),
    "step.context": ("1e6", "write `context: 1000000`"),
    "step.page_size": ("48", "allowed: 16, 32, 64, 128"),
    "step.outputs": ("[token]", "write `tokens`"),
    "step.source": ("rows", "allowed: tokens, hidden"),
    "target.gpu": ("gb200x", "allowed: "),
    "numerics.activation": ("fp16", "allowed: bf16, fp32"),
    "numerics.kv_cache": ("fp8", "write `kv_cache: fp8_e4m3`"),
    "numerics.kv_scale": (".nan", "kv_scale"),
    "numerics.kda_state": ("no", "allowed: fp32, bf16"),
    "numerics.expert_activation": ("true", "is true"),
    "profile": ("stok", "did you mean stock?"),
    "choices.moe_front": ("shard", "did you mean sharded?"),
    "choices.moe_tail": ("allreduce", "did you mean all_reduce?"),
    "choices.mla_front": ("1", "allowed: auto, replicated, sharded"),
    "choices.side_stream": ("on", "allowed: off, auto"),
    "choices.kda_rollback": ("slot", "did you mean slots?"),
    "capture.buckets": ("8", "write `buckets: [8]`"),
    "model.preset": ("kimi-linear", "did you mean kimi-linear-48b?"),
    "model.config": ("3", 'write `config: "3"`'),
    "model.layers": ("[0, x]", "`model.layers[1]` is \"x\""),
    "version": ("3", "allowed: 1"),
}


def test_every_field_has_a_wrong_value() -> None:
    assert set(ONE_WRONG_VALUE) | {"extends"} == set(planfile.leaves())


@pytest.mark.parametrize("name", ONE_WRONG_VALUE)
def test_one_wrong_flag_is_one_problem(name: str, tmp_path: Path) -> None:
    value, said = ONE_WRONG_VALUE[name]
    plan = write(tmp_path, "plan.yaml", MINIMAL)
    found = problems(plan, "step.query=1", f"{name}={value}")
    assert len(found) == 1
    assert found[0].startswith("--set #2: `")
    assert f"{name}={value}\n" in found[0]
    assert said in found[0]


@pytest.mark.parametrize("name", ONE_WRONG_VALUE)
def test_null_is_refused_or_the_default(name: str, tmp_path: Path) -> None:
    plan = write(tmp_path, "plan.yaml", MINIMAL)
    if name in ("model.layers", "model.config"):
        assert load_spec(plan, [f"{name}="]) == load_spec(plan)
    else:
        (found,) = problems(plan, f"{name}=")
        assert "is empty" in found or "names no model" in found


def test_defaults(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, "plan.yaml", MINIMAL))
    assert (spec.parallel.tp, spec.step.rows, spec.step.context, spec.gpu) == (1, 1, 8192, "gb300")
    assert spec.numerics.kv_cache == "bf16"
    assert spec.buckets == (1, 2, 4, 8, 16, 32, 64)
    assert spec.layers == tuple(range(27))
    assert {str(spec.origins[name]) for name in ("step.query", "parallel.tp", "profile")} == {"default"}


def test_later_wins(tmp_path: Path) -> None:
    """Bases in order, then the file, then flags in order; nested values are merged one by one."""
    (tmp_path / "base").mkdir()
    write(tmp_path / "base", "one.yaml", MINIMAL + "step: {sequences: 1, query: 2, context: 64}\nparallel: {tp: 2}\n")
    write(tmp_path / "base", "two.yaml", "step: {sequences: 2, page_size: 32}\nparallel: {tp: 4}\n")
    top = "version: 1\nextends: [base/one.yaml, base/two.yaml]\nparallel: {tp: 8}\n"
    plan = write(tmp_path, "plan.yaml", top)
    spec = load_spec(plan, ["step.query=3", "step={query: 4, outputs: [logits]}"])
    assert (spec.step.sequences, spec.step.query, spec.step.context, spec.step.page_size) == (2, 4, 64, 32)
    assert spec.parallel.tp == 8
    assert spec.step.outputs == ("logits",)
    origins = {name: str(spec.origins[name]).removeprefix(f"{tmp_path}/") for name in spec.origins}
    assert origins["step.context"] == "base/one.yaml:3:41"
    assert origins["step.sequences"] == "base/two.yaml:1:19"
    assert origins["parallel.tp"] == "plan.yaml:3:16"
    assert origins["step.query"] == "--set #2"
    assert origins["numerics.kda_state"] == "default"
    assert origins["model.hidden"] == "presets/kimi-linear-48b.json:14:18"


def test_a_later_model_replaces_the_earlier(tmp_path: Path) -> None:
    config = (planfile.FOLDER / "presets" / "kimi-k3.json").read_text()
    (tmp_path / "checkpoint").mkdir()
    write(tmp_path / "checkpoint", "config.json", config)
    write(tmp_path, "base.yaml", MINIMAL)
    plan = write(tmp_path, "plan.yaml", "version: 1\nextends: base.yaml\nmodel: {config: checkpoint}\n")
    spec = load_spec(plan)
    assert spec.model.family == "kimi_k3"
    assert spec.origins["model.hidden"].kind == "config"
    line = spec.origins["model.hidden"].line
    assert '"hidden_size": 7168' in config.split("\n")[line - 1]
    assert load_spec(plan, ["model.preset=kimi-linear-48b"]).model.family == "kimi_linear"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_of_files_is_named(length: int, tmp_path: Path) -> None:
    names = [f"{number}.yaml" for number in range(length)]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        write(tmp_path, name, f"{MINIMAL}extends: {following}\n")
    (found,) = problems(str(tmp_path / names[0]))
    assert " -> ".join([*names, names[0]]) in found


def test_one_base_by_two_ways_is_no_circle(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", MINIMAL)
    for side in ("left", "right"):
        write(tmp_path, f"{side}.yaml", "extends: base.yaml\n")
    plan = write(tmp_path, "plan.yaml", "version: 1\nextends: [left.yaml, right.yaml]\n")
    assert load_spec(plan).model.layers == 27


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "there is no file"), (b"", "is empty"), (b"\xff\xfe\x00", "not UTF-8"), (b"- 1\n", "must be a mapping")],
)
def test_files_that_are_no_plan(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "plan.yaml").write_bytes(content)
    (found,) = problems(str(tmp_path / "plan.yaml"))
    assert said in found


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    (found,) = problems(str(tmp_path))
    assert "cannot be read" in found


def test_near_file_name_is_offered(tmp_path: Path) -> None:
    write(tmp_path, "plan.yaml", MINIMAL)
    (found,) = problems(str(tmp_path / "plam.yaml"))
    assert "did you mean plan.yaml?" in found


def test_layers_are_a_subset(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, "plan.yaml", MINIMAL), ["model.layers=[0, 1, 3]"])
    assert spec.layers == (0, 1, 3)
    assert spec.model.layers == 27


def test_scale_is_a_float_even_when_written_whole(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, "plan.yaml", MINIMAL), ["numerics={kv_cache: fp8_e4m3, kv_scale: 2}"])
    assert isinstance(spec.numerics.kv_scale, float)


def test_schema_is_up_to_date() -> None:
    """Write it with ``python -m k3plan.compiler.reading.planfile --write``."""
    assert planfile.SCHEMA_FILE.read_text() == planfile.schema_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load_and_fit_the_schema(path: Path) -> None:
    schema = planfile.plan_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(YAML(typ="safe").load(path.read_text()), schema)
    assert path.read_text().startswith("# yaml-language-server: $schema=../compiler/schema/plan.schema.json\n")
    load_spec(path)


@pytest.mark.parametrize("case", ["names", "types", "ranges"])
def test_schema_refuses_what_the_reader_refuses(case: str) -> None:
    data = YAML(typ="safe").load((GOLDEN / f"{case}.yaml").read_text())
    assert not jsonschema.Draft202012Validator(planfile.plan_schema()).is_valid(data)


def test_schema_describes_every_field() -> None:
    schema = planfile.plan_schema()
    for section in [schema, *schema["$defs"].values()]:
        assert section["description"]
        for name, field in section["properties"].items():
            assert field.get("description"), name


def test_resolved_values_are_shown_with_their_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec = load_spec("examples/k3-gb300-tp16-verify8.yaml", ["step.context=1024"])
    text = f"{show_resolved(spec)}\n"
    golden = GOLDEN / "resolved.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert len({line.split("  ")[0] for line in text.splitlines()}) == len(spec.origins)


def test_loading_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, time; start = time.process_time()\n"
        "import k3plan.compiler.reading.source as source; imported = time.process_time() - start\n"
        f"source.load_spec({str(ROOT / 'examples' / 'k3-gb300-tp16.yaml')!r})\n"
        "total = time.process_time() - start\n"
        "import json; print(json.dumps([imported, total, 'torch' in sys.modules]))\n"
    )
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout))
    assert not any(torch for _, _, torch in runs)
    # processor time, the best of three: a quiet machine takes 0.02 and 0.15 s, and other tests share the cores
    assert min(imported for imported, _, _ in runs) < 0.1
    assert min(total for _, total, _ in runs) < 0.5
