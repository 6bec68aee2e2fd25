"""Run by Alembic: applies the versions that a database lacks, on the connection that has locked it."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
