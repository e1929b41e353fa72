import io
import json
import logging
import os
import re
import warnings

import pytest

from monolith.errors import ConfigError
from monolith.observe import Doublings, configure_logging, only_warnings, progress, say_repeats
from monolith.observe.logs import OncePerCause, logs_json, name_process, process_label


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_plain_lines_from_the_level_on():
    out = io.StringIO()
    configure_logging("info", stream=out)
    logging.getLogger("monolith.table").info("grew to %d rows", 8)
    logging.getLogger("monolith.table").debug("not this")
    assert out.getvalue().endswith("INFO monolith.table: grew to 8 rows\n")
    assert out.getvalue().count("\n") == 1


def test_lines_of_libraries_for_each_request_are_shown_at_the_level_debug_alone():
    for level, shown in (("info", False), ("warning", False), ("debug", True)):
        out = io.StringIO()
        configure_logging(level, stream=out)
        logging.getLogger("httpx").info("HTTP Request: GET")
        assert ("HTTP Request" in out.getvalue()) == shown
        logging.getLogger("httpx").warning("careful")
        assert "careful" in out.getvalue()


def test_json_is_one_object_per_line_with_extras_and_the_traceback():
    out = io.StringIO()
    configure_logging("debug", json=True, stream=out)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("monolith.sync").exception("two\nlines", extra={"shard": 3})
    line = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert line["level"] == "error"
    assert line["logger"] == "monolith.sync"
    assert line["message"] == "two\nlines"
    assert line["shard"] == 3
    assert "ValueError: broken" in line["exception"]
    assert line["time"].endswith("+00:00")


def test_an_extra_cannot_hide_the_message():
    out = io.StringIO()
    configure_logging("info", json=True, stream=out)
    logging.getLogger("x").info("true", extra={"level": "forged"})
    assert json.loads(out.getvalue())["level"] == "info"


def test_a_terminal_gets_a_rich_handler(root_logger):
    out = Terminal()
    configure_logging("INFO", stream=out)
    logging.getLogger("monolith").warning("careful")
    assert "careful" in out.getvalue()
    assert type(root_logger.handlers[-1]).__name__ == "RichHandler"


def test_a_warning_is_written_once_for_each_cause_and_counted():
    out = io.StringIO()
    configure_logging("info", stream=out)
    log = logging.getLogger("monolith.data")
    for number in range(3):
        log.warning("file %d has no column 'a'", number, extra={"cause": "no column 'a'"})
        log.warning("worker %d is gone", number % 2)  # without a cause, another text is another warning
        log.error("failed")
        log.info("step")
    lines = [line.partition(": ")[2] for line in out.getvalue().splitlines()]
    assert lines.count("file 0 has no column 'a'") == 1
    assert lines.count("worker 0 is gone") == lines.count("worker 1 is gone") == 1
    assert lines.count("failed") == lines.count("step") == 3
    assert len(lines) == 9
    say_repeats()
    assert out.getvalue().endswith(
        "are shown once; there were 3 x file 2 has no column 'a'; 2 x worker 0 is gone\n"
    )
    said = out.getvalue()
    say_repeats()  # once
    assert out.getvalue() == said


def test_a_warning_that_lasts_is_written_again_every_hour():
    now = [0.0]
    once = OncePerCause(clock=lambda: now[0])
    passed = []
    for minute in range(0, 150, 10):
        now[0] = minute * 60.0
        record = logging.makeLogRecord({"levelno": logging.WARNING, "name": "x", "msg": "no space"})
        passed += [minute] if once.filter(record) else []
    assert passed == [0, 60, 120]
    assert once.repeats() == ["15 x no space"]


def test_warnings_of_one_cause_are_one_and_the_newest_is_said_in_the_end():
    once = OncePerCause(clock=lambda: 0.0)

    def passes(text: str, cause: str | None = None) -> bool:
        fields = {"levelno": logging.WARNING, "name": "x", "msg": text, "cause": cause}
        return once.filter(logging.makeLogRecord(fields))

    assert passes("worker 1 was lost")
    assert passes("worker 2 was lost")
    assert passes("1 file is empty", "empty files")
    assert not passes("2 files are empty", "empty files")
    assert once.repeats() == ["2 x 2 files are empty"]


def test_warnings_of_python_and_torch_are_logged_once_too():
    out = io.StringIO()
    with warnings.catch_warnings():
        logging.captureWarnings(False)  # pytest has its own way to show them
        warnings.simplefilter("always")
        configure_logging("info", stream=out)
        for _ in range(3):
            warnings.warn("the array is not writable", UserWarning, stacklevel=1)
    assert out.getvalue().count("UserWarning: the array is not writable") == 1
    assert "WARNING py.warnings" in out.getvalue()


def test_only_warnings_are_shown_where_the_level_says_so():
    assert not only_warnings()  # nobody has configured anything
    configure_logging("warning", stream=io.StringIO())
    assert only_warnings()
    out = Terminal()
    with progress("Saving", 10, "rows", stream=out) as bar:
        bar.advance(5)
    assert out.getvalue() == ""
    configure_logging("info", stream=io.StringIO())
    assert not only_warnings()


def test_configuring_again_replaces_our_handler_and_leaves_others_alone(root_logger):
    other = logging.NullHandler()
    root_logger.addHandler(other)
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", stream=first)
    configure_logging("info", stream=second)
    logging.getLogger("x").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
    assert other in root_logger.handlers


def test_an_unknown_level_names_ours_whatever_other_libraries_have_added(monkeypatch):
    monkeypatch.setattr(logging, "getLevelNamesMapping", lambda: {"TRACE": 5, "DEBUG": 10, "INFO": 20})
    with pytest.raises(ConfigError, match=r"'loud'; choose one of debug, info, warning, error, critical$"):
        configure_logging("loud", stream=io.StringIO())


def test_a_count_is_worth_a_line_at_first_and_whenever_it_has_doubled() -> None:
    doublings = Doublings()
    assert [count for count in range(100) if doublings.due(count)] == [1, 2, 4, 8, 16, 32, 64]
    assert doublings.due(1000)
    assert not doublings.due(1999)


def test_each_line_of_one_of_several_processes_names_the_process(root_logger) -> None:  # noqa: ARG001
    out = io.StringIO()
    configure_logging("info", stream=out)
    assert process_label() == ""
    name_process("worker 3")
    name_process("worker 3")  # again changes nothing
    logging.getLogger("a.b").info("hello")
    assert process_label() == f"[worker 3 pid {os.getpid()}] "
    assert re.fullmatch(rf"\[worker 3 pid {os.getpid()}\] \d{{4}}-.* INFO a\.b: hello\n", out.getvalue())


def test_in_json_it_is_a_field(root_logger) -> None:  # noqa: ARG001
    out = io.StringIO()
    configure_logging("info", json=True, stream=out)
    name_process("ps 1")
    logging.getLogger("a").info("hello", extra={"step": 7})
    found = json.loads(out.getvalue())
    assert (found["who"], found["pid"], found["message"], found["step"]) == ("ps 1", os.getpid(), "hello", 7)
    assert (logs_json(), process_label()) == (True, "")
