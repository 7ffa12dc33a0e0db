"""The file part of `LocalNode`: what the node port says of files, over `files` (from the host) and `transfers` (through the guest)."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence

from corral.domain.fence import Fence
from corral.errors import CorralError
from corral.linux.guesttree import Look
from corral.node import files, transfers
from corral.node.body import Body
from corral.ports.node import Collected, FileBlocks, FileEvents, FileInfo, FilePage


class FileCalls(ABC):
    """See `ports.node.Node`. What is not here is the instance's own: who is alive, under which fence, where its base lies."""

    _bodies: dict[str, Body]

    @abstractmethod
    def _alive(self, instance_id: str) -> Body:
        """The live instance, or why there is none."""

    @abstractmethod
    def _living(self, instance_id: str) -> Body:
        """The live instance, be it paused, or why there is none."""

    @abstractmethod
    def _check_fence(self, body: Body, fence: Fence) -> None:
        """`lease_lost` for a fence below the instance's floor."""

    @abstractmethod
    def _mark_path(self, instance_id: str) -> str:
        """Where its base of changes is kept."""

    async def put_files(self, instance_id: str, fence: Fence, items: Sequence[tuple[str, int, bytes | None]]) -> None:
        async with self._on_disk(instance_id) as body, body.putting:
            # In its turn: what waits here under an older fence than the last one changes nothing.
            self._check_fence(body, fence)
            work = asyncio.ensure_future(
                files.put(body.tree, self._mark_path(instance_id), items, settle=not body.is_quiet)
            )
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:  # the thread goes on: the turn ends with it
                await asyncio.wait({work})
                raise

    async def put_tar(
        self, instance_id: str, fence: Fence, tar: AsyncIterator[bytes], dest: str, user: str = "sandbox"
    ) -> None:
        body = self._alive(instance_id)
        with self._under(body, fence):
            await transfers.put_tar(body, fence, tar, dest, user)

    async def get_tar(self, instance_id: str, path: str, user: str = "sandbox") -> AsyncIterator[bytes]:
        body = self._alive(instance_id)
        async for piece in transfers.get_tar(body, path, user):
            yield piece

    async def stat_file(self, instance_id: str, path: str, *, follow: bool = True, user: str = "sandbox") -> FileInfo:
        return await transfers.stat(self._alive(instance_id), path, follow=follow, user=user)

    async def list_files(
        self,
        instance_id: str,
        path: str,
        *,
        recursive: bool = False,
        limit: int = 1000,
        after: str = "",
        user: str = "sandbox",
    ) -> FilePage:
        body = self._alive(instance_id)
        return await transfers.list_page(body, path, recursive=recursive, limit=limit, after=after, user=user)

    async def read_file(
        self,
        instance_id: str,
        path: str,
        *,
        first: int | None = None,
        last: int | None = None,
        user: str = "sandbox",
    ) -> FileBlocks:
        return await transfers.read(self._alive(instance_id), path, first, last, user)

    async def write_file(
        self,
        instance_id: str,
        fence: Fence,
        path: str,
        blocks: AsyncIterator[bytes],
        *,
        mode: int | None = None,
        parents: bool = True,
        overwrite: bool = True,
        size: int | None = None,
        user: str = "sandbox",
    ) -> tuple[FileInfo, bool]:
        async with self._changing(instance_id, fence) as body:
            return await transfers.write(
                body,
                fence,
                path,
                blocks,
                mode=mode,
                parents=parents,
                overwrite=overwrite,
                size=size,
                user=user,
            )

    async def move_file(
        self, instance_id: str, fence: Fence, source: str, target: str, *, overwrite: bool, user: str = "sandbox"
    ) -> FileInfo:
        async with self._changing(instance_id, fence) as body:
            return await transfers.move(body, fence, source, target, overwrite=overwrite, user=user)

    async def make_directory(
        self, instance_id: str, fence: Fence, path: str, *, parents: bool, mode: int, user: str = "sandbox"
    ) -> FileInfo:
        async with self._changing(instance_id, fence) as body:
            return await transfers.make_directory(body, fence, path, parents=parents, mode=mode, user=user)

    async def remove_file(
        self, instance_id: str, fence: Fence, path: str, *, recursive: bool, user: str = "sandbox"
    ) -> None:
        async with self._changing(instance_id, fence) as body:
            await transfers.remove(body, fence, path, recursive=recursive, user=user)

    async def empty_directories(
        self, instance_id: str, fence: Fence, paths: Sequence[str], *, user: str = "sandbox"
    ) -> str | None:
        body = self._alive(instance_id)
        with self._under(body, fence):
            return await transfers.empty(body, fence, paths, user=user)

    async def watch_files(
        self, instance_id: str, path: str, *, recursive: bool = False, user: str = "sandbox"
    ) -> FileEvents:
        return await transfers.watch(self._alive(instance_id), path, recursive, user)

    @contextlib.contextmanager
    def _under(self, body: Body, fence: Fence) -> Iterator[None]:
        """Work under a fence; what is cut short by a newer one is told so, however it ended inside."""
        self._check_fence(body, fence)
        try:
            yield
        except CorralError as error:
            if fence < body.floor and error.code != "lease_lost" and not body.gone.is_set() and body.destroying is None:
                raise CorralError(
                    "lease_lost", f"fence {fence} is below {body.floor}", floor=str(body.floor)
                ) from error
            raise

    @contextlib.asynccontextmanager
    async def _on_disk(self, instance_id: str) -> AsyncIterator[Body]:
        """Work of the host on a live instance's files: what it misses because the instance ends under it is told by that end."""
        body = self._living(instance_id)
        with body.visit():
            try:
                yield body
            except (OSError, CorralError) as error:
                if body.destroying is not None:
                    raise CorralError("sandbox_deleted", f"instance {instance_id} is being destroyed") from error
                if body.gone.is_set():
                    raise CorralError("sandbox_lost", f"instance {instance_id} is not alive here") from error
                raise

    @contextlib.asynccontextmanager
    async def _changing(self, instance_id: str, fence: Fence) -> AsyncIterator[Body]:
        """What a caller changes while no program runs is no program's doing."""
        body = self._alive(instance_id)
        try:
            with self._under(body, fence):
                yield body
        finally:
            if not body.execs and body.destroying is None:
                with contextlib.suppress(OSError):
                    files.touch(self._mark_path(instance_id))

    async def mark(self, instance_id: str) -> None:
        async with self._on_disk(instance_id) as body:
            await files.mark(body.tree, self._mark_path(instance_id), settle=not body.is_quiet)

    async def _freshen(self, instance_id: str) -> None:
        """What callers changed while no program ran counts as there before the next one."""
        async with self._on_disk(instance_id) as body:
            await files.freshen(body.tree, self._mark_path(instance_id), settle=not body.is_quiet)

    async def collect(
        self, instance_id: str, *, outputs: Sequence[str], max_bytes: int, into: str | None, mark: bool = False
    ) -> Collected:
        body = self._bodies.get(instance_id)
        if body is None:
            raise CorralError("not_found", f"instance {instance_id} is not here")
        if mark and not outputs and body.is_quiet and body.look is not None and files.unchanged(body.tree, body.look):
            return Collected((), False, (), ())
        looks: list[Look] = []
        quiet, body.look = body.is_quiet, None
        with body.visit():
            found = await files.collect(
                body.tree,
                self._mark_path(instance_id),
                outputs=outputs,
                max_bytes=max_bytes,
                into=into,
                mark=mark,
                settle=not quiet,
                seen=looks.append,
            )
        if quiet and body.is_quiet and looks:
            body.look = looks[0]
        return found
