"""Zipage."""
