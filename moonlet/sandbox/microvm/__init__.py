"""Machines with a kernel of their own: QEMU (KVM where it really boots, else emulation) and Firecracker."""
