"""However a command ends, it ends with the right status and at most one sentence."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import typer

from kvcore.models.trace import TraceError
from kvcore.reports.edge import TRACEBACK, BadInput, Status, at_least, parse_budget, run_edge
from kvcore.reports.trace_files import TraceFileError
from kvcore.strategies.campaign import HarnessFailed
from kvcore.targets.registry import UnknownTarget


def ending(error: BaseException) -> Callable[[], object]:
    def command() -> object:
        raise error

    return command


@pytest.mark.parametrize("status", list(Status))
def test_a_status_is_passed_on(status: Status, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_edge(lambda: status) == status
    assert capsys.readouterr() == ("", "")


def test_a_command_that_answers_nothing_is_clean() -> None:
    assert run_edge(lambda: None) == Status.CLEAN


@pytest.mark.parametrize("kind", [BadInput, UnknownTarget, TraceError, TraceFileError])
def test_bad_input_is_one_sentence(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_edge(ending(kind("[bold]it[/bold] is wrong"))) == Status.BAD_INPUT
    assert capsys.readouterr() == ("", "kvcore: [bold]it[/bold] is wrong\n")


def test_a_usage_error_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    error = typer.BadParameter("no\nnumber", param_hint="--seeds")
    assert run_edge(ending(error)) == Status.BAD_INPUT
    assert capsys.readouterr().err == "kvcore: Invalid value for --seeds: no number\n"


def test_a_long_sentence_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run_edge(ending(BadInput("word " * 100)))
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interruption_is_no_failure(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_edge(ending(error)) == Status.INTERRUPTED
    assert capsys.readouterr().err == "kvcore: interrupted\n"


def test_a_failure_of_the_harness_says_how_to_see_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_edge(ending(ValueError("this\nand that"))) == Status.HARNESS_FAILED
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "ValueError: this" in error
    assert f"{TRACEBACK}=1" in error


def test_a_failure_without_a_message_is_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_edge(ending(RuntimeError())) == Status.HARNESS_FAILED
    assert "RuntimeError: no message" in capsys.readouterr().err


def test_of_a_workers_traceback_the_last_line_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = "Traceback (most recent call last):\n  File x\nKeyError: 'it'\n"
    run_edge(ending(HarnessFailed(text)))
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "KeyError: 'it'" in error


@pytest.mark.parametrize(("value", "shown"), [("1", True), ("0", False), ("", False)])
def test_the_traceback_is_shown_if_asked_for(
    value: str,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(TRACEBACK, value)
    run_edge(ending(ValueError("this")))
    assert ("Traceback (most recent call last)" in capsys.readouterr().err) == shown


def test_a_stream_that_cannot_show_a_sign_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run_edge(lambda: print("open → closed", flush=True)) == Status.CLEAN
    assert raw.getvalue() == b"open ? closed\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45", 45), ("30s", 30), ("2m", 120), ("1h", 3600), ("1.5m", 90), (".5", 0.5)],
)
def test_time_budgets_have_units(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "-3", "0", "0s", "3d", "three", "nan", "inf", "-infh", "1 h 3", "1e999"]
)
def test_a_time_budget_that_is_none_is_bad_input(text: str) -> None:
    with pytest.raises(BadInput, match="time budget"):
        parse_budget(text)


def test_numbers_have_a_least_value() -> None:
    assert at_least(1, 1, "--workers") == 1
    with pytest.raises(BadInput, match="--workers is 0, expected at least 1"):
        at_least(1, 0, "--workers")
