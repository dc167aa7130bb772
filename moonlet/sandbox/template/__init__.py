"""Templates: the files that machines start from.

source (directory, OCI image, Debian packages) ──fill──> rootfs ──rename──> roots/HASH ──resolve──> Template
"""

from moonlet.sandbox.template.source import Source, parse_source
from moonlet.sandbox.template.store import TemplateInfo, TemplateStore

__all__ = ["Source", "TemplateInfo", "TemplateStore", "parse_source"]
