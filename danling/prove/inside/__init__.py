"""The part of `danling prove` that runs in the processes of a script. It imports torch and the standard library, and nothing of danling."""
