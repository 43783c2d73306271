"""Makes a page from each notebook in docs/, with the committed outputs. No notebook is
run.
"""

import base64
import json
from pathlib import Path

from mkdocs.structure.files import File


def page(notebook: dict, name: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its figures by file name."""
    parts, figures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                figure = f"{name}_{len(figures)}.png"
                figures[figure] = base64.b64decode(data["image/png"])
                parts.append(f"![Figure {len(figures)} of this page](figures/{figure})")
            elif "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            else:
                parts.append(
                    "```text\n"
                    + "".join(output.get("text", data.get("text/plain", ""))).rstrip()
                    + "\n```"
                )
    return "\n\n".join(parts), figures


def on_files(files, config):
    for path in sorted(Path(config.docs_dir).glob("*.ipynb")):
        text, figures = page(json.loads(path.read_text()), path.stem)
        text += f"\n\nThis page is the notebook [docs/{path.name}]({path.name}), as it ran."
        files.append(File.generated(config, f"{path.stem}.md", content=text))
        for name, content in figures.items():
            files.append(File.generated(config, f"figures/{name}", content=content))
    return files
