"""Which parsers read a model's text: from the flags, or from what its chat template shows.

Called once, by `process.py`.
"""

from collections.abc import Callable

from cearx.frontend.chat_template import ChatTemplate
from cearx.frontend.think_splitter import CLOSE
from cearx.frontend.tool_parsers import ToolParser, detect_tool_parser, find_tool_parser


def choose_tool_parser(flag: str, template: ChatTemplate | None) -> Callable[[], ToolParser] | None:
    """For --tool-call-parser; raises ValueError for a name that nobody knows."""
    name: str | None = flag
    if flag == "auto":
        name = None if template is None else detect_tool_parser(template.source)
    return None if name in (None, "none") else find_tool_parser(str(name))


def has_reasoning(flag: str, template: ChatTemplate | None) -> bool:
    """For --reasoning-parser."""
    if flag == "auto":
        return template is not None and CLOSE in template.source
    return flag != "none"
