"""Whether a call of a tool needs somebody's approval; asking for it is the runtime's, and doubt is never a no."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import structlog

from bough_server.tools.tool import Tool

_log = structlog.get_logger(__name__)


def needs_approval(tool: Tool, arguments: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments, as JSON values, waits for an approval.

    A predicate that raises or that says neither True nor False counts as a yes, and is logged. It is given a copy:
    what it does to the arguments is lost.
    """
    if isinstance(tool.approval, bool):
        return tool.approval
    try:
        said: object = tool.approval(copy.deepcopy(dict(arguments)))
    except (Exception, SystemExit):
        _log.warning("approval of a call could not be decided: it is asked for", tool=tool.name, exc_info=True)
        return True
    if isinstance(said, bool):
        return said
    if inspect.iscoroutine(said):
        said.close()
    _log.warning("approval of a call was decided by no bool: it is asked for", tool=tool.name, said=type(said).__name__)
    return True
