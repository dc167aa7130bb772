"""Small container images, written as tools do: OCI layouts, tars of them, `docker save`."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def tar_bytes(files: Mapping[str, bytes | str | None]) -> bytes:
    """Content is bytes, a link's target a str, a directory None."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.mode, member.mtime = 0o755, 1_500_000_000
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config_of(layers: Sequence[bytes], env: Sequence[str] = (), workdir: str = "") -> bytes:
    settings = {"Env": list(env), "WorkingDir": workdir}
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{sha256(layer)}" for layer in layers]}
    return json.dumps({"architecture": ARCHITECTURE, "os": "linux", "config": settings, "rootfs": rootfs}).encode()


class Layout:
    """An OCI layout under construction; damage can be done to `folder` afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self._manifests: list[dict] = []
        self._write_index()

    def blob(self, data: bytes, media_type: str = "") -> dict:
        (self.folder / "blobs/sha256" / sha256(data)).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{sha256(data)}", "size": len(data)}

    def add(
        self,
        layers: Sequence[bytes],
        *,
        name: str = "",
        env: Sequence[str] = (),
        workdir: str = "",
        compress=gzip.compress,
        architecture: str = ARCHITECTURE,
        nested: bool = False,
    ) -> None:
        manifest = {
            "schemaVersion": 2,
            "config": self.blob(config_of(layers, env, workdir)),
            "layers": [self.blob(compress(layer)) for layer in layers],
        }
        found = self.blob(json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
        found["platform"] = {"architecture": architecture, "os": "linux"}
        if nested:
            index = {"schemaVersion": 2, "manifests": [found]}
            found = self.blob(json.dumps(index).encode(), "application/vnd.oci.image.index.v1+json")
        if name:
            found["annotations"] = {"org.opencontainers.image.ref.name": name}
        self._manifests.append(found)
        self._write_index()

    def _write_index(self) -> None:
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self._manifests}))

    def as_tar(self, path: Path, mode: str = "w") -> Path:
        with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
            tar.add(self.folder, ".")
        return path


def docker_save(path: Path, images: Mapping[str, Sequence[bytes]], env: Sequence[str] = ()) -> Path:
    """The older form: a folder per layer, and one layer that is a link to another's."""
    entries, files = [], {}
    for tag, layers in images.items():
        config = config_of(layers, env)
        files[f"{sha256(config)}.json"] = config
        names = []
        for layer in layers:
            names.append(f"{sha256(layer)}/layer.tar")
            files[names[-1]] = layer
        entries.append({"Config": f"{sha256(config)}.json", "RepoTags": [tag], "Layers": names})
    files["manifest.json"] = json.dumps(entries).encode()
    path.write_bytes(tar_bytes(files))
    return path
