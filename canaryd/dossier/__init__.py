"""The RMA dossier of a device."""
