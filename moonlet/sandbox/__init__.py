"""Machines that pause: one protocol, four backends, a service that loses nothing. No torch in this room.

Sandbox (api)  ── LocalSandbox ── Manager ── Backend (namespace | gvisor | microvm) ── guest agent
               └─ RemoteSandbox ── any E2B-compatible service, ours included
"""
