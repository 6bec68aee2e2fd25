"""Resumable generations: they run apart from the requests that asked for them, and every frame is journaled before a
client gets it.

`Generations` is what requests ask. Behind it, each apart from the others: `live` is what readers follow, `driver` runs
the Job, `writer` journals, `leases` keeps what is this process's and adopts what nobody keeps, `replay` makes a run of
a record again.

After a death the answer is written anew from the journal's tokens: they are what an engine would write again, so the
same frames come out, and those that the journal has already are passed over.
"""

from legato.server.generations.service import Generations

__all__ = ["Generations"]
