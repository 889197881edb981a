import io

import pytest
from rich.console import Console

from eagle_jax.progress import loading_bar, spinner


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def test_the_bar_follows_what_is_reported():
    console = terminal()
    with loading_bar(True, "Loading the target", console) as report:
        report(512, 2048, "layers.0.mlp.up_proj.weight")
        report(2048, 2048, "norm.weight")
    shown = console.file.getvalue()
    assert "Loading the target" in shown
    assert "2.0/2.0 KiB" in shown
    assert "norm.weight" in shown


def test_the_spinner_says_what_goes_on():
    console = terminal()
    with spinner(True, "Compiling", console):
        pass
    assert "Compiling" in console.file.getvalue()


@pytest.mark.parametrize(("enabled", "is_terminal"), [(False, True), (True, False), (False, False)])
def test_silence(enabled, is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal)
    with loading_bar(enabled, "Loading", console) as report, spinner(enabled, "Compiling", console):
        assert report is None
    assert console.file.getvalue() == ""


def test_stderr_is_where_they_draw(capsys):
    with loading_bar(True, "Loading") as report, spinner(True, "Compiling"):
        assert report is None  # as it is captured, it is no terminal
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("wait", [loading_bar, spinner])
def test_errors_pass_and_the_bar_goes(wait):
    console = terminal()
    with pytest.raises(KeyError), wait(True, "Waiting", console):
        raise KeyError
    assert console.file.getvalue().endswith("\x1b[2K")  # the line is cleared
