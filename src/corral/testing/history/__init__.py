"""Did the system keep its promises while things broke? Seeded chaos over a real installation, and a pure checker of what happened.

`events` is a history: what clients asked and were told, what node and guest really accepted (the *witness*), what was broken, what was
left at the end. `checker` judges it by rules that know nothing of how the system works. `plan` draws from a seed what clients do and
what is broken when; `harness` does it. `corral bench chaos` is the long version.
"""
