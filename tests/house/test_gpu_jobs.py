"""``.ci/gpu.py``: lanes, limits and the table, with jobs that need no GPU; and that the real jobs name what exists."""
from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from k3plan.cli import app

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".ci"))

import gpu  # noqa: E402
import gpu_jobs  # noqa: E402
from gpu_jobs import Job  # noqa: E402


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    tree = tmp_path / "tree"
    tree.mkdir()
    return gpu.environment(tree)


def run(jobs: list[Job], gpus: int, out: Path, env: dict[str, str], seconds: float = 60.0) -> dict[str, gpu.Run]:
    return {found.job.name: found for found in gpu.run_all(jobs, gpus, seconds, out, env)}


def spans(found: dict[str, gpu.Run], *names: str) -> list[tuple[float, float]]:
    return [(found[name].started, found[name].started + found[name].seconds) for name in names]


def apart(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[1] <= other[0] or other[1] <= one[0]


def test_a_job_for_two_is_alone_and_halves_share_a_gpu(tmp_path: Path, env: dict[str, str]) -> None:
    jobs = [Job("timed", "sleep 0.5", 9), Job("half", "sleep 0.6", 9, share=0.5),
            Job("other", "sleep 0.6", 9, share=0.5), Job("both", "echo $CUDA_VISIBLE_DEVICES", 9, gpus=2),
            Job("more", "true", 9, gpus=4)]
    found = run(jobs, 2, tmp_path, env)
    assert set(found) == {"timed", "half", "other", "both"}
    timed, half, other, both = spans(found, "timed", "half", "other", "both")
    assert all(apart(both, one) for one in (timed, half, other))
    assert not apart(half, other)
    assert found["half"].gpus == found["other"].gpus != found["timed"].gpus
    assert (tmp_path / "both.txt").read_text().splitlines()[-1] == "0,1"


def test_a_job_over_its_time_is_ended_with_its_children(tmp_path: Path, env: dict[str, str],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("long", "echo begun; touch $OUT/a; (sleep 2; touch $OUT/late) & wait", 1), Job("wrong", "exit 3", 9),
            Job("good", "echo $SECONDS_LEFT", 7), Job("never", "true", 9, gpus=3)]
    done = gpu.run_all(jobs, 1, 60.0, tmp_path, env)
    assert {found.job.name: found.end for found in done} == {"long": "out of time", "wrong": "exit 3", "good": "ok"}
    assert gpu.report(jobs, done, tmp_path) == 2
    said = capsys.readouterr().out
    assert re.search(r"long +out of time +1 s  begun", said)
    assert "never          not run" in said
    assert gpu.report(jobs[:2], [found for found in done if found.job in jobs[:2]], tmp_path) == 1
    assert (tmp_path / "good.txt").read_text().splitlines()[-1] == "7"
    time.sleep(1.5)
    assert [path.name for path in (tmp_path / "long").iterdir()] == ["a"]


def test_none_starts_when_little_time_is_left(tmp_path: Path, env: dict[str, str]) -> None:
    assert run([Job("late", "true", 9)], 1, tmp_path, env, seconds=gpu.LEAST - 1) == {}


def test_its_k3plan_is_this_source_tree(tmp_path: Path, env: dict[str, str]) -> None:
    job = Job("where", "k3plan --help >/dev/null && pytest --version && python -c "
                       "'import k3plan.graphs as g; print(g.__file__)'", 60)
    found = run([job], 1, tmp_path, env)
    log = (tmp_path / "where.txt").read_text()
    assert found["where"].end == "ok", log
    assert log.splitlines()[-1].startswith(env["PYTHONPATH"].split(":")[0])


@pytest.mark.parametrize("job", gpu_jobs.JOBS, ids=lambda job: job.name)
def test_real_jobs_name_commands_options_and_files_that_exist(job: Any) -> None:
    for command in re.split(r" && |\n", job.command.replace("$((SECONDS_LEFT", "((SECONDS_LEFT")):
        words = [word for word in shlex.split(command) if not word.startswith("((")]
        files = [word for word in words if word.startswith(("tests/", "examples/", "ops_"))]
        missing = [name for name in files if not (ROOT / name).exists()]
        assert not missing, f"{job.name} names {missing}"
        words = [word for word in words if not re.match("[A-Z0-9_]+=", word)]
        if words[0] != "k3plan":
            continue
        group: Any = get_command(app)
        while hasattr(group, "commands"):
            group = group.commands[(words := words[1:])[0]]
        options = {name for parameter in group.params for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {word for word in words if word.startswith("--")}
        assert given <= options, f"{job.name}: {sorted(given - options)} are no options of {group.name}"


def test_names_are_the_jobs_own() -> None:
    names = [job.name for job in gpu_jobs.JOBS]
    assert len(set(names)) == len(names)
    assert all(job.limit <= 600 and 0 < job.share <= 1 for job in gpu_jobs.JOBS)
