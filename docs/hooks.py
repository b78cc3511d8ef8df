"""Adapts the documentation, which is also readable as plain files, for MkDocs.

Links to files outside docs/ cannot work on the site. A link to an example becomes a link to the generated page of all
examples; other links become the path of the file. `<!-- settings: NAME -->` becomes the tables of a dataclass.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
from settings import tables

_SETTINGS = re.compile(r"<!-- settings: (\w+) -->")
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)\)")
_EXAMPLES = "examples.md"


def on_files(files: Files, config: Any) -> Files:
    """Adds the page of all examples."""
    paths = sorted((Path(config.config_file_path).parent / "examples").glob("*.py"))
    paths.sort(key=lambda path: path.stem != "one_file_ppo")  # the first one
    sections = [f'## {path.stem}\n\n```python title="examples/{path.name}"\n{path.read_text()}```' for path in paths]
    intro = (
        "# Examples\n\n`one_file_ppo` is a complete PPO in one file, to copy and change. Each other example shows one "
        "thing. Run them from the command line: `python examples/quickstart.py`."
    )
    files.append(File.generated(config, _EXAMPLES, content="\n\n".join([intro, *sections])))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replaces links to files outside docs/, and inserts the tables of settings."""
    folder = posixpath.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = posixpath.normpath(posixpath.join("docs", folder, link))
        if target.startswith("docs/"):
            return match[0]
        if target.startswith("examples/"):
            return f"[{text}]({posixpath.relpath(_EXAMPLES, folder or '.')}#{Path(target).stem})"
        return text if target in text else f"{text}: `{target}`"

    return _SETTINGS.sub(lambda match: tables(match[1]), _LINK.sub(replace, markdown))
