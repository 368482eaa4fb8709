-- Argo CD's view of a DisaggInference: kstatus conditions, with suspension as such.
local health = {status = "Progressing", message = "waiting for the operator"}
if obj.spec ~= nil and obj.spec.suspend == true then
  return {status = "Suspended", message = "spec.suspend is true"}
end
if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return health
end
local found = {}
for _, condition in ipairs(obj.status.conditions or {}) do
  found[condition.type] = condition
end
local stalled, ready, reconciling = found.Stalled, found.Ready, found.Reconciling
if stalled ~= nil and stalled.status == "True" then
  return {status = "Degraded", message = stalled.reason .. ": " .. (stalled.message or "")}
end
if reconciling ~= nil and reconciling.status == "True" then
  return {status = "Progressing", message = reconciling.reason .. ": " .. (reconciling.message or "")}
end
if ready == nil then
  return health
end
if ready.status == "True" then
  return {status = "Healthy", message = ready.message or ""}
end
return {status = "Degraded", message = ready.reason .. ": " .. (ready.message or "")}
