"""The judge: functions that compute a device's verdict from its test results, without side effects."""
