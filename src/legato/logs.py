"""How the log is written: lines of text, or of JSON for machines. It knows no requests."""

from __future__ import annotations

import json
import logging
import time

__all__ = ["set_up_logs"]


def set_up_logs(form: str, *, verbose: bool) -> None:
    """Write the log to standard error. `verbose`: also what is no warning."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    logging.getLogger("alembic").setLevel(logging.WARNING)  # Which tells at length that nothing was to be done.


class _Json(logging.Formatter):
    """One object per line. What a record was given as `notes` is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "notes", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
