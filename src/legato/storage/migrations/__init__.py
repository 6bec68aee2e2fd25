"""The versions of the database, each made from the one before by Alembic."""
