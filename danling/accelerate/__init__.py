"""Hugging Face Accelerate beneath the library's update: what it is told, the accelerator itself, and the gradient that goes through it."""

from __future__ import annotations
