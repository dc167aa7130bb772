"""Sandboxes out of what every Linux kernel has: namespaces, an overlay, seccomp, cgroups where they can be written.

backend ── machine ── cgroup | freeze        one machine: freeze, save, usage, destroy
   ├── launch ── stage ── linux              how it comes to life; as root under an unprivileged uid of its own
   ├── bwrap ── seccomp ── syscalls          bubblewrap's command line and the filter that it loads
   └── landlock                              the weak level, for kernels that forbid user namespaces
"""
