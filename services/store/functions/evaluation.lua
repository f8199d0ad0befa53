-- Evaluation: rounds of tickets that are each sampled by one policy version. Their tickets are claimed, renewed, failed and submitted
-- as those of training (tickets.lua); this file begins and ends a round, and decides which generators stay on its version.
-- reads and writes: run (evaluated_version, evaluation_abandoned), fleet, fleet:status, evaluations, ledger, claims, attempts,
--                   expiries, partial:<ticket>, turns:<ticket>
-- owns, only while a round is open:
--   eval:round      hash  version; total; opened_ms; started_ms, finished_ms: first volunteer, last result; fault
--   eval:tickets, eval:tickets:rollouts  streams  its tickets without a result (prelude.lua, `stream_of`)
--   eval:volunteers hash  pod that stays on the version -> member
--   eval:results    hash  ticket -> header

local STREAMS = {[':eval:tickets'] = 'generators', [':eval:tickets:rollouts'] = 'environments'}

local function name_of(member)
  return string.match(member, '^(.*):') or member
end

local function stays(prefix, member)
  return redis.call('HGET', prefix .. ':eval:volunteers', name_of(member)) == member
end

-- Return how many volunteers have had a heartbeat since.
local function evaluating(prefix, since)
  local found = 0
  for _, member in ipairs(redis.call('HVALS', prefix .. ':eval:volunteers')) do
    local heard = redis.call('ZSCORE', prefix .. ':fleet', member)
    if heard and tonumber(heard) >= since then found = found + 1 end
  end
  return found
end

-- Return how many generators keep training while `member` and the volunteers evaluate.
local function trainers_left(prefix, member, since)
  local left = 0
  for _, other in ipairs(redis.call('ZRANGE', prefix .. ':fleet', since, '+inf', 'BYSCORE')) do
    if other ~= member and not stays(prefix, other) then
      local read, status = pcall(cjson.decode, redis.call('HGET', prefix .. ':fleet:status', other) or '')
      local training = read and type(status) == 'table' and status.kind == 'generator' and status.phase ~= 'draining'
      if training and type(status.world) == 'number' and status.world > 0 then left = left + 1 end
    end
  end
  return left
end

-- Return whether the open round has work for a generator: a ticket that it holds or may claim, or one of an environment, whose
-- holder needs a generator to sample.
local function has_work(prefix, name, lease_ms)
  if redis.call('XLEN', prefix .. ':eval:tickets:rollouts') > 0 then return true end
  local stream = prefix .. ':eval:tickets'
  local function pending(...)
    return #redis.call('XPENDING', stream, 'generators', ...) > 0
  end
  if redis.call('XLEN', stream) > redis.call('XPENDING', stream, 'generators')[1] then return true end
  return pending('IDLE', lease_ms, '-', '+', 1) or pending('-', '+', 1, name)
end

-- args: leader fence, version, then of each ticket its id, its body, and 1 if its rollouts run in an environment, otherwise 0.
-- Returns 1 if the round of `version` is open, now or by an earlier call; 0 if another is, or the version was handled before.
register_leader('eval_open', {'version', INTEGER, EACH, 'ticket', TEXT, 'body', TEXT, 'rollouts', FLAG}, function(prefix, args)
  local version = redis.call('HGET', prefix .. ':eval:round', 'version')
  if version then return version == args[2] and 1 or 0 end
  if tonumber(args[2]) <= (number(prefix, 'evaluated_version') or -1) then return 0 end
  local tickets = records(args, 3, 'id', 'body', 'rollouts')
  for stream, group in pairs(STREAMS) do redis.call('XGROUP', 'CREATE', prefix .. stream, group, '0', 'MKSTREAM') end
  for _, ticket in ipairs(tickets) do add_ticket(prefix, lane_of(ticket.rollouts, '1'), ticket.id, ticket.body) end
  redis.call('HSET', prefix .. ':eval:round', 'version', args[2], 'total', #tickets, 'opened_ms', run_ms(prefix))
  redis.call('HSET', prefix .. ':run', 'evaluated_version', args[2])
  notify(prefix, 'evaluation')
  return 1
end, true)

-- args: leader fence, version, rounds. Counts the rounds up to `version`, which were due and can no longer be held, as skipped.
register_leader('eval_skip', {'version', INTEGER, 'rounds', NATURAL}, function(prefix, args)
  if tonumber(args[2]) <= (number(prefix, 'evaluated_version') or -1) then return 0 end
  redis.call('HSET', prefix .. ':run', 'evaluated_version', args[2])
  count(prefix, 'evaluations_skipped', args[3])
  return 1
end)

-- args: member, version it holds, fence of the trainer that sent it, ttl ms, lease ms, max generators, min training generators.
-- Returns 1 if the member must stay on these weights and evaluate: it is admitted now, or was before and the round still has work
-- for it. Otherwise 0, and it is no longer a volunteer. One that was admitted keeps its weights when another trainer takes over.
register('eval_volunteer', {
  'member', TEXT, 'version', INTEGER, 'sender', NATURAL, 'ttl ms', NATURAL, 'lease ms', NATURAL, 'max generators', NATURAL,
  'min training', NATURAL,
}, function(prefix, args)
  local member, version, now = args[1], args[2], run_ms(prefix)
  local run = redis.call('HMGET', prefix .. ':run', 'steps', 'stopping', 'finished', 'trainer_fence')
  local round = redis.call('HMGET', prefix .. ':eval:round', 'version', 'fault')
  local admitted, since = stays(prefix, member), now - tonumber(args[4])
  local open = round[1] == version and not round[2] and not run[2] and not run[3]
  if not open or not (admitted or run[4] == args[3]) or not has_work(prefix, name_of(member), args[5]) then
    if admitted then redis.call('HDEL', prefix .. ':eval:volunteers', name_of(member)) end
    return 0
  end
  if admitted then return 1 end
  if version ~= run[1] then -- after the last version there is nothing left to train
    if evaluating(prefix, since) >= tonumber(args[6]) or trainers_left(prefix, member, since) < tonumber(args[7]) then return 0 end
  end
  redis.call('HSET', prefix .. ':eval:volunteers', name_of(member), member)
  redis.call('HSETNX', prefix .. ':eval:round', 'started_ms', now)
  return 1
end)

-- args: member. It no longer stays on a version.
register('eval_resign', {'member', TEXT}, function(prefix, args)
  return stays(prefix, args[1]) and redis.call('HDEL', prefix .. ':eval:volunteers', name_of(args[1])) or 0
end)

-- args: ttl ms. Returns {evaluated version, last round abandoned and why}, and of an open round also {version, total, results,
-- live volunteers, started ms, finished ms, now ms, fault}.
register('eval_look', {'ttl ms', NATURAL}, function(prefix, args)
  local run = redis.call('HMGET', prefix .. ':run', 'evaluated_version', 'evaluation_abandoned')
  local reply = {run[1] or '-1', run[2] or ''}
  local round = redis.call('HMGET', prefix .. ':eval:round', 'version', 'total', 'started_ms', 'finished_ms', 'fault')
  if not round[1] then return reply end
  local now = run_ms(prefix)
  local results, volunteers = redis.call('HLEN', prefix .. ':eval:results'), evaluating(prefix, now - tonumber(args[1]))
  for _, value in ipairs({round[1], round[2], results, volunteers, round[3] or 0, round[4] or 0, now, round[5] or ''}) do
    reply[#reply + 1] = value
  end
  return reply
end)

-- args: leader fence, version, reason, record. Ends the round: with a record it is reported, without one it was abandoned for the
-- reason. Returns 1, or 0 if the round was ended before; either way none of its keys remain.
register_leader('eval_close', {'version', INTEGER, 'reason', TEXT, 'record', TEXT}, function(prefix, args)
  if redis.call('HGET', prefix .. ':eval:round', 'version') ~= args[2] then return 0 end
  if args[4] ~= '' then
    redis.call('XADD', prefix .. ':evaluations', 'MAXLEN', '~', 10000, '*', 'm', args[4])
    count(prefix, 'evaluations', 1)
  else
    redis.call('HSET', prefix .. ':run', 'evaluation_abandoned', 'version ' .. args[2] .. ': ' .. args[3])
    count(prefix, 'evaluations_abandoned', 1)
  end
  for stream in pairs(STREAMS) do
    local entries = {}
    for i, entry in ipairs(redis.call('XRANGE', prefix .. stream, '-', '+')) do
      entries[i] = entry[1]
      redis.call('DEL', prefix .. ':partial:' .. entry[2][2], prefix .. ':turns:' .. entry[2][2])
    end
    forget_tickets(prefix, entries)
  end
  for _, name in ipairs(EVALUATION_PARTS) do redis.call('UNLINK', prefix .. ':eval:' .. name) end
  notify(prefix, 'evaluation')
  return 1
end)
