"""Resumable generations: they run apart from the requests that started them, and every frame is journaled before a
client gets it.

Requests call `Generations`. Behind it: `live` holds the frames that readers follow, `driver` runs the Job, `writer`
journals, `leases` renews this process's leases and adopts generations whose process died, `replay` rebuilds a run from
its record. SQL is in `storage`; only `routes` knows HTTP.

After a crash the frames are encoded again from the journal's tokens. An engine would write the same tokens, so the same
frames come out, and those that the journal has already are skipped.
"""

from legato.server.generations.service import Generations

__all__ = ["Generations"]
