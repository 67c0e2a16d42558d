"""Writes the tables of docs/reasons.md, which are those of fastgen/reasons.py.

usage: reasons_page.py
"""

from pathlib import Path

from fastgen.reasons import CODES

PAGE = Path(__file__).parent.parent / "docs" / "reasons.md"


def page() -> str:
    """Returns the page: the introduction as it is, then a table of codes for each section."""
    introduction = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    sections = [introduction.rstrip("\n")]
    for title, codes in CODES.items():
        rows = "\n".join(f"| `{code}` | {meaning} |" for code, meaning in codes.items())
        sections.append(f"## {title}\n\n| code | meaning |\n|---|---|\n{rows}")
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
