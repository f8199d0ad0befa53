-- What all functions share. Every function takes one key, the run's prefix `grpo:{NAME}`, and builds names from it
-- as services/protocol/keys.py does. A function is atomic and one entry of the append-only file.

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function ring(prefix, topic)
  redis.call('PUBLISH', prefix .. ':bell', topic)
end

local function number(prefix, field)
  return tonumber(redis.call('HGET', prefix .. ':run', field))
end

local function count(prefix, field, by)
  redis.call('HINCRBY', prefix .. ':ledger', field, by)
end

local function free_slots(prefix, n)
  if n ~= 0 then
    redis.call('HINCRBY', prefix .. ':run', 'slots_used', -n)
    ring(prefix, 'slots')
  end
end

-- Nil when the caller holds the fencing number `field` of the run, else the refusal to return.
local function fenced(prefix, field, fence)
  if redis.call('HGET', prefix .. ':run', field) ~= fence then
    return redis.error_reply('FENCED ' .. field .. ' ' .. fence .. ' was superseded')
  end
end

local function register(name, body)
  redis.register_function(LIBRARY .. '_' .. name, function(keys, args)
    return body(keys[1], args)
  end)
end

local function bury(prefix, ticket, reason, body)
  redis.call('XADD', prefix .. ':deadletter', '*', 'ticket', ticket, 'reason', reason, 'body', body)
  count(prefix, 'failed', 1)
end
