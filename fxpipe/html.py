"""Text in notebooks: tables that are wider than the page scroll instead of being broken."""

from __future__ import annotations

from html import escape

_STYLE = "white-space: pre; overflow-x: auto; line-height: 1.2; font-size: 85%"


def preformatted(text: str) -> str:
    """Text as HTML that keeps its lines."""
    return f'<pre style="{_STYLE}">{escape(text)}</pre>'
