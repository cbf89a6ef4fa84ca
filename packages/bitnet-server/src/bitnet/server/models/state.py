"""The state of a server: its models, who is let in, and what is shared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bitnet.core import __version__
from bitnet.server.batch.batches import Batches
from bitnet.server.batch.store import Store
from bitnet.server.models.admission import Admission
from bitnet.server.models.catalog import Catalog
from bitnet.server.models.pool import Pool
from bitnet.server.models.pulls import Pulls
from bitnet.server.models.service import Source
from bitnet.server.models.settings import Settings
from bitnet.server.request.bodies import Bodies


class State:
    """What endpoints and the application act on. The caller must close it.

    Args:
        sources: Models that stay; the first is the default for requests that name none.
        catalog: Models that come and go; None: there are none.

    Attributes:
        files: Clients' files; None: none are kept.
        batches: Clients' batches, which the application answers; None: none are.

    Raises:
        BitNetError: The folder for files cannot be used.
    """

    def __init__(self, sources: Sequence[Source], settings: Settings, catalog: Catalog | None = None) -> None:
        self.settings = settings
        self.pool = Pool(sources, settings, catalog)
        self.shared = self.pool.shared
        self.admission = Admission(self.shared)
        self.pulls = Pulls()
        self.bodies = Bodies(settings.max_body)
        folder = settings.file_storage
        self.files = None if folder is None else Store(Path(folder), settings.max_file_storage)
        self.batches: Batches | None = None

    @property
    def ready(self) -> bool:
        return not self.admission.draining and self.pool.failure is None and not self.shared.threads.stuck

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every answer."""
        return {"server": f"bitnet/{__version__}"}

    def close(self) -> None:
        """Unload the models that the pool loaded."""
        self.bodies.close()
        if self.files is not None:
            self.files.close()
        self.shared.threads.shutdown(wait=True, cancel_futures=True)
        self.pool.close()
