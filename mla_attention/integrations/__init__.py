"""This package inside other people's training frameworks."""
