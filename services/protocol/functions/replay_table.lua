-- The replay table: how a group leaves it. Shared by settle (replay.lua) and prepare (steps.lua).
-- reads and writes: ledger, run, group:<group>, payload:<payload>
-- owns:             replay:order   zset  group -> issue sequence
--                   replay:version zset  group -> oldest policy version
--                   replay:used    set   groups in the table that were drawn at least once
--                   departed       list  groups that left the table after use; the next plan takes charge of their payload

local function leave_table(prefix, group)
  redis.call('ZREM', prefix .. ':replay:order', group)
  redis.call('ZREM', prefix .. ':replay:version', group)
  return redis.call('SREM', prefix .. ':replay:used', group) == 1
end

local function delete_group(prefix, group)
  local key = prefix .. ':group:' .. group
  redis.call('UNLINK', prefix .. ':payload:' .. (redis.call('HGET', key, 'payload') or ''), key)
end

-- Takes a group out with an outcome. One that was trained has its outcome already, and a checkpoint may still need it.
local function drop_group(prefix, group, outcome)
  if leave_table(prefix, group) then
    redis.call('RPUSH', prefix .. ':departed', group)
    return
  end
  delete_group(prefix, group)
  count(prefix, outcome, 1)
  free_slots(prefix, 1)
end

local function words(text)
  local list = {}
  for word in string.gmatch(text, '%S+') do list[#list + 1] = word end
  return list
end
