"""The planner: cluster + model + workload -> Plan. Pure arithmetic; it reads only files it is given."""
