"""How a sandbox goes from one state to the next: one file per kind of transition, all on the `Core` of a manager."""
