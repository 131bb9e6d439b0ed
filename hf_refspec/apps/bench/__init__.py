"""Measuring how much a drafter helps."""
