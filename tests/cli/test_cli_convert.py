from __future__ import annotations

from cli_command import SETTINGS


def test_a_converted_model_gives_the_same_answer(answer, run_here, tiny_model, tmp_path):
    converted = tmp_path / "converted"
    run = run_here("convert", tiny_model, converted, "--dtype=fp32")
    assert run.status == 0, run.stderr
    assert run.stdout == f"{converted}\n"
    run = run_here("generate", "hi", "--model", converted, *SETTINGS, "--max-tokens=12")
    assert run.stdout == answer.stdout
    run_here("convert", tiny_model, converted).assert_error(str(converted), "already exists")
