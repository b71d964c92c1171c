"""Captured graphs under the microscope: record, inspect, verify, time, report. Decides nothing about a plan."""
