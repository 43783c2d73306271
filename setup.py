"""Makes the package's description from README.md. An index of packages shows it without
the repository: links to files become the names of the files, and pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup

text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
text = re.sub(r"<picture>.*?</picture>\n\n|<img .*?>\n\n", "", text, flags=re.DOTALL)
text = re.sub(r"\[([^\]\n]+)\]\(#[^)]*\)", r"\1", text)
text = re.sub(r"\[([^\]\n]+)\]\((?!https?://)([^)]*)\)", r"\1 (`\2`)", text)
text += "\nThe files named here are in the repository and in the source distribution.\n"
setup(long_description=text, long_description_content_type="text/markdown")
