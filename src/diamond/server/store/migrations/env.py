"""How Alembic reaches the database: through the connection `Database.migrate` opened, in its transaction."""

from alembic import context

from diamond.server.store import identity_models, pool_models  # noqa: F401 (their tables belong to the same metadata)
from diamond.server.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite alters tables by copying them
)
context.run_migrations()
