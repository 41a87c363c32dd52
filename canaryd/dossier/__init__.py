"""The RMA dossier of a device: the report with which a vendor takes a faulty part back."""
